"""Front doors to the batch manager: an HTTP server with the OpenAI API, also in front of simulated devices."""
