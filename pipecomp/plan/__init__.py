"""The planner: predicts the seconds of a step from model, links and method, and recommends settings."""
