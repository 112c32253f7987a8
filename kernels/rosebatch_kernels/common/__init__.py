"""What several operators share: device functions, helpers of launchers, references. Imports no operator."""
