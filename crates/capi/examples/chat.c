/* A chat turn and the tokens of a text: `chat MODEL [QUESTION [OPTIONS]]`. */
#include <kiln.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pieces are JSON: a program would use its JSON library. This one shows them as they are. */
static int show(const char *piece, void *user) {
    ++*(int *)user;
    puts(piece);
    return 0;
}

static int stop_at_once(const char *piece, void *user) {
    (void)piece;
    (void)user;
    return 1;
}

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, kiln_error());
    return 1;
}

int main(int count, char **words) {
    if (count < 2) {
        fprintf(stderr, "usage: %s MODEL [QUESTION [OPTIONS]]\n", words[0]);
        return 2;
    }
    kiln_model *model = kiln_open(words[1], count > 3 ? words[3] : NULL);
    if (!model) return failed("open");

    /* A question with quotes would have to be escaped. */
    char request[1024];
    snprintf(request, sizeof request,
             "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}], \"max_tokens\": 16, \"temperature\": 0}",
             count > 2 ? words[2] : "What is a kiln?");
    int pieces = 0;
    if (kiln_generate(model, 1, request, show, &pieces) != 0) return failed("generate");

    if (kiln_generate(model, 2, "{\"prompt\": \"Once\", \"max_tokens\": 200}", stop_at_once, NULL) != 0) return failed("stop");
    /* Nothing of it runs any more. */
    if (kiln_cancel(model, 2) != 0) return failed("cancel");
    /* A mistake is told. */
    if (kiln_generate(model, 3, "{\"prompt\": 5}", show, &pieces) != -1 || !strstr(kiln_error(), "prompt")) return 1;

    uint32_t tokens[64];
    int64_t length = kiln_tokenize(model, "Hello", tokens, 64);
    if (length < 0) return failed("tokenize");
    char text[64];
    if (kiln_detokenize(model, tokens, (size_t)length, text, sizeof text) < 0) return failed("detokenize");
    printf("%s: %lld tokens of %zu; %d pieces; libkiln %s\n", text, (long long)length, kiln_context(model), pieces, kiln_version());
    kiln_close(model);
    return 0;
}
