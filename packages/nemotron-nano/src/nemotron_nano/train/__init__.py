"""The reference trainer: assembles a run from its config and drives it. Imports no model; it trains anybody's."""
