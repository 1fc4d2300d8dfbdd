"""The launchers: what runs auxiliary jobs, and starts commands as several processes."""
