"""What people see: events, metrics, alerts."""
