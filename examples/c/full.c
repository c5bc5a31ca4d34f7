/* A program for effattn (docs/programs.md) in C: softmax attention with gradients, bidirectional and causal.
 *
 *   cc -O2 -o full full.c -lm && effattn check --program ./full.toml
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One message: 8 bytes "effattn1", two lengths of 8 bytes each (little-endian), JSON, safetensors. */
static char *receive(char **body) {
    char front[8];
    uint64_t length[2];
    if (fread(front, 8, 1, stdin) != 1 || fread(length, 8, 2, stdin) != 2) exit(0); /* effattn is gone */
    char *header = calloc(length[0] + 1, 1);
    *body = calloc(length[1] + 1, 1);
    if (fread(header, 1, length[0], stdin) != length[0] || fread(*body, 1, length[1], stdin) != length[1]) exit(0);
    return header;
}

static void send(const char *header, const void *body, uint64_t bytes) {
    uint64_t length[2] = {strlen(header), bytes};
    fwrite("effattn1", 8, 1, stdout);
    fwrite(length, 8, 2, stdout);
    fwrite(header, 1, length[0], stdout);
    fwrite(body, 1, bytes, stdout);
    fflush(stdout);
}

/* A float32 tensor of a safetensors body and its shape; NULL where there is none. effattn writes JSON without blanks. */
static float *tensor(char *body, const char *name, long shape[4]) {
    char key[64];
    char *data = body + 8 + *(uint64_t *)body;
    snprintf(key, sizeof key, "\"%s\":{", name);
    char *at = strstr(body + 8, key);
    if (!at || at > data) return NULL;
    char *sizes = strstr(at, "\"shape\":[") + 9, *offset = strstr(at, "\"data_offsets\":[") + 16;
    for (int i = 0; i < 4 && *sizes != ']'; i++, sizes += *sizes == ',') shape[i] = strtol(sizes, &sizes, 10);
    return (float *)(data + strtol(offset, NULL, 10));
}

static void attention(char *body, int causal) {
    long s[4], t[4], m[4];
    float *q = tensor(body, "q", s), *k = tensor(body, "k", t), *v = tensor(body, "v", t);
    float *go = tensor(body, "grad_out", s), *mask = tensor(body, "mask", m);
    long B = s[0], H = s[1], N = s[2], D = s[3], T = t[2], rows = B * H * N * D, keys = B * H * T * D;
    float *result = calloc(2 * (rows + keys), sizeof(float));
    float *out = result, *gq = out + rows, *gk = gq + rows, *gv = gk + keys;
    double *p = malloc(T * sizeof(double)), *dp = malloc(T * sizeof(double)), scale = 1 / sqrt(D);
    for (long bh = 0; bh < B * H; bh++)
        for (long i = 0; i < N; i++) {
            long row = (bh * N + i) * D, first = bh * T * D;
            double most = -INFINITY, sum = 0, mean = 0;
            for (long j = 0; j < T; j++) {
                int visible = (!mask || mask[bh / H * T + j] != 0) && (!causal || j <= i + T - N);
                p[j] = 0;
                for (long d = 0; d < D; d++) p[j] += q[row + d] * k[first + j * D + d] * scale;
                if (!visible) p[j] = -INFINITY;
                if (p[j] > most) most = p[j];
            }
            if (most == -INFINITY) continue; /* sees nothing: 0, as is its gradient */
            for (long j = 0; j < T; j++) sum += p[j] = exp(p[j] - most);
            for (long j = 0; j < T; j++) {
                p[j] /= sum;
                dp[j] = 0;
                for (long d = 0; d < D; d++) {
                    out[row + d] += p[j] * v[first + j * D + d];
                    gv[first + j * D + d] += p[j] * go[row + d];
                    dp[j] += go[row + d] * v[first + j * D + d];
                }
                mean += p[j] * dp[j];
            }
            for (long j = 0; j < T; j++)
                for (long d = 0; d < D; d++) {
                    gq[row + d] += p[j] * (dp[j] - mean) * k[first + j * D + d] * scale;
                    gk[first + j * D + d] += p[j] * (dp[j] - mean) * q[row + d] * scale;
                }
        }
    const char *names[4] = {"out", "grad_q", "grad_k", "grad_v"}, *dtype = "F32";
    char *answer = calloc(1024 + 8 * (rows + keys), 1), *text = answer + 8;
    long at = 0, room = 1000;
    for (int i = 0; i < 4; i++) {
        long count = i < 2 ? rows : keys, n = i < 2 ? N : T;
        int used = snprintf(text, room, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%ld,%ld,%ld,%ld],\"data_offsets\":[%ld,%ld]}",
                            i ? "," : "{", names[i], dtype, B, H, n, D, at, at + 4 * count);
        text += used, room -= used, at += 4 * count;
    }
    *text++ = '}';
    while ((text - answer) % 8) *text++ = ' ';
    *(uint64_t *)answer = text - answer - 8;
    memcpy(text, result, at);
    send("{}", answer, text - answer + at);
    free(result), free(answer), free(p), free(dp);
}

int main(void) {
    for (char *body, *header;; free(header), free(body)) {
        header = receive(&body);
        if (strstr(header, "\"request\":\"version\""))
            send("{\"version\":\"full.c 1\"}", "", 0);
        else if (strstr(header, "\"request\":\"describe\""))
            send("{\"mechanisms\":{\"full\":{\"passes\":[\"infer\",\"train\"],\"knobs\":{\"mem\":[0]}}}}", "", 0);
        else if (strstr(header, "\"request\":\"evaluate\""))
            attention(body, strstr(header, "\"causal\":true") != NULL);
        else if (strstr(header, "\"request\":\"end\""))
            return 0;
        else
            send("{\"error\":\"full.c evaluates only\",\"outcome\":\"unsupported\"}", "", 0);
    }
}
