"""Plan, execute, settle: requests in, finished answers out."""
