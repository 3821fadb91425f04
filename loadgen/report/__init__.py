"""The pages about runs: self-contained HTML with charts as SVG."""
