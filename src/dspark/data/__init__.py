"""From dataset sources (hub, a user's file, built in) to prompts."""
