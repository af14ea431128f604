"""What happens: requests, sessions and arrivals. Imports nothing else of ours."""
