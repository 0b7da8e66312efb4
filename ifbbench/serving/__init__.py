"""Front doors to the batch manager, also of simulated devices: HTTP with the OpenAI API, and Triton."""
