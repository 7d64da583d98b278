"""Stand-ins for hardware and services that tests cannot have."""
