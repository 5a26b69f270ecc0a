"""What a step learns from: prompts, trajectories, rewards, and the batch they become."""
