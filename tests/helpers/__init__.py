"""What tests import or start: worker programs, fakes, scenarios, data makers.  No test is here."""
