"""The commit: what makes a checkpoint exist."""
