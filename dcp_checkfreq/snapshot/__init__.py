"""The copy of the live state that is written while training goes on."""
