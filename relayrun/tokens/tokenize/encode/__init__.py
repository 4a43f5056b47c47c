"""Encode texts to token ids: the tokenizer, the libraries that encode, and the proof that they agree.

    tokenizer, tokenizer_files     load a tokenizer; find it on the hub, convert it, cache it
    libraries                      the reference (`tokenizers`) and the fast engines, behind one interface
    families                       the forms of tokenizers that a fast engine encodes exactly
    engines                        select the engine of a job and prove it
    routing                        texts that the fast engine must not have, and the reference for them

In: `PackedTexts`. Out: ids and lengths, equal to those of `Tokenizer.encode`.
"""
