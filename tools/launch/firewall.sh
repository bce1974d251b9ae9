#!/usr/bin/env bash
# Firewall rules of one node of a run: its ports are for the nodes of the run only.
#
# usage: tools/launch/firewall.sh [--apply | --remove] [--allow ADDRESS]... NODE_ADDRESS...
#   Without --apply the rules are printed.  --allow: another machine that has to reach ports above
#   1023 here, such as Slurm's controller.  IPv4; as root, on every node (nft, Linux 3.13 or later).
#
# torch, SGLang, Ray and Mooncake listen on every interface, and gloo asks for nothing.  Therefore
#   - machines that are not nodes of the run reach no port above 1023 here;
#   - nodes of the run do not reach 20000-31999, from which engines take ports for their own node.
# Connections of the node to itself and answers to its own are let through.  Users of the node are
# not kept apart: nftables sees no user of an incoming packet.
# `moerl doctor` with cluster.firewall=true connects from node to node and says what is open.
set -euo pipefail

action=print
allowed=()
nodes=()
while (($#)); do
  case $1 in
    --apply) action=apply ;;
    --remove) action=remove ;;
    --allow)
      allowed+=("${2:?--allow needs an address}")
      shift
      ;;
    -*) echo "firewall.sh: unknown option $1" >&2 && exit 2 ;;
    *) nodes+=("$1") ;;
  esac
  shift
done

if [[ $action == remove ]]; then
  exec nft delete table inet moerl
fi
((${#nodes[@]})) || { echo "firewall.sh: name the addresses of all nodes of the run" >&2 && exit 2; }
for address in "${nodes[@]}" ${allowed[@]+"${allowed[@]}"}; do
  [[ $address =~ ^[0-9]+(\.[0-9]+){3}(/[0-9]+)?$ ]] || {
    echo "firewall.sh: $address is no IPv4 address or network" >&2
    exit 2
  }
done

# list ADDRESS...: separated by commas
list() {
  local IFS=,
  echo "$*"
}

rules() {
  cat <<RULES
table inet moerl
delete table inet moerl
table inet moerl {
  set nodes {
    type ipv4_addr
    flags interval
    elements = { $(list "${nodes[@]}") }
  }
  chain input {
    type filter hook input priority filter; policy accept;
    iif "lo" accept
    ct state established,related accept
RULES
  if ((${#allowed[@]})); then
    echo "    ip saddr { $(list "${allowed[@]}") } accept"
  fi
  cat <<'RULES'
    ip saddr @nodes tcp dport 20000-31999 drop
    ip saddr @nodes accept
    tcp dport 1024-65535 drop
    udp dport 1024-65535 drop
  }
}
RULES
}

if [[ $action == apply ]]; then
  rules | nft -f -
else
  rules
fi
