"""Front doors to the batch manager, also of simulated devices: the OpenAI API over HTTP, and Triton Inference Server."""
