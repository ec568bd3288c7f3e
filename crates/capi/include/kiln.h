/* kiln.h: run large language models (GGUF files) from C: on GPUs through Vulkan, on the CPU where there is none.
 *
 * Texts are UTF-8 and end with a zero byte. Requests and pieces of answers are JSON. Every function may be called from any thread, and a
 * model may be used by many at once: what they ask at the same time is computed together. Link with -lkiln.
 *
 *     static int show(const char *piece, void *user) { puts(piece); return 0; }
 *
 *     kiln_model *model = kiln_open("model.gguf", NULL);
 *     if (!model) { fprintf(stderr, "%s\n", kiln_error()); return 1; }
 *     kiln_generate(model, 0, "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}", show, NULL);
 *     kiln_close(model);
 */
#ifndef KILN_H
#define KILN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A loaded model. */
typedef struct kiln_model kiln_model;

/* Gets each piece of an answer: a JSON object whose "type" is "prompt", "token", "text", "reasoning", "call", "arguments", "call_end" or
 * "end". The text is valid until the function returns. Any other result than 0 ends the answer. */
typedef int (*kiln_piece)(const char *piece, void *user);

/* The version of the library. */
const char *kiln_version(void);

/* Why the last call of this thread failed; an empty text if it did not. Valid until the thread's next call. */
const char *kiln_error(void);

/* Opens a model file. `options` is NULL or a JSON object with any of: "device" (GPU by index, name, PCI address or UUID, or "cpu"),
 * "threads", "context", "parallel" (sequences at once), "gpu_layers", "cache_type_k", "cache_type_v", "chat_template", "adapters"
 * ([{"path", "scale"}]), "host_cache" (bytes), "reproducible", "fallback". Returns NULL if it fails. */
kiln_model *kiln_open(const char *path, const char *options);

/* Closes a model. No call that uses it may be running. NULL is ignored. */
void kiln_close(kiln_model *model);

/* Answers a request, {"messages": [...]} or {"prompt": "..."} with the fields of OpenAI's API (docs/c.md), and gives the pieces of the answer
 * to `piece`, which is called on this thread. `id` is a number by which kiln_cancel may end the answer. Returns 0, or -1 if it fails. */
int kiln_generate(kiln_model *model, uint64_t id, const char *request, kiln_piece piece, void *user);

/* Ends the answers with this id, from any thread. Returns how many there were. */
int kiln_cancel(kiln_model *model, uint64_t id);

/* Writes the vector of a text, of the length 1, to `vector`, which has room for `room` numbers. Returns how many numbers the vector has (no
 * more than `room` are written), or -1 if it fails. */
int64_t kiln_embed(kiln_model *model, const char *text, float *vector, size_t room);

/* Writes the tokens of a text to `tokens`, which has room for `room`. Returns how many there are, or -1 if it fails. */
int64_t kiln_tokenize(kiln_model *model, const char *text, uint32_t *tokens, size_t room);

/* Writes the text of tokens and a zero byte to `text`, which has room for `room` bytes. Returns the bytes of the text without the zero byte,
 * or -1 if it fails. A text that has no room is cut. */
int64_t kiln_detokenize(kiln_model *model, const uint32_t *tokens, size_t count, char *text, size_t room);

/* Most tokens of one sequence. */
size_t kiln_context(kiln_model *model);

#ifdef __cplusplus
}
#endif

#endif
