"""Made-up attacks on a grader and harmless homework, and the trainer that learns to tell them apart."""
