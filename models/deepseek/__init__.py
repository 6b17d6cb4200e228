"""DeepSeek-V4-Flash (`deepseek_v4`) and DeepSeek-V4.1-Flash (`deepseek_v41`): two generations that share primitives."""
