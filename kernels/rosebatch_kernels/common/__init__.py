"""What several operators share: device functions, helpers of launchers, references and benches. Imports no operator."""
