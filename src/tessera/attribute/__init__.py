"""Joules to kernels: what the sensor saw of the board, solved for what each kernel drew."""
