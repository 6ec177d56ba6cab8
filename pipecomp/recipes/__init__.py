"""What the programs in recipes/ share: command lines, data, models, and the run from configuration to saved model."""
