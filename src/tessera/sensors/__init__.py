"""Sources of power readings, all behind one `Sensor` protocol."""
