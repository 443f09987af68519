"""When to save, and what to keep. Rules only: no clock, file, thread or rank."""
