"""Gives joules to kernels: solves what the sensor saw of the board for what each kernel drew."""
