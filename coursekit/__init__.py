"""What the lessons use and the engine does not: request mixes, figures, widgets, graders, the build."""
