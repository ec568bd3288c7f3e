// wkv6, token after token: y_t = r_t (S + tf k_t^T v_t), then S = td_t S + k_t^T v_t, S the state [value, key].
// k, v, r, td: [S, heads, tokens]; tf: [S, heads]; states: [S values, S keys, heads, sequences].
// With MIX, y_t is the mix of its heads (head_mix) with p.weight, p.bias: [S * heads] and p.gate: [S, heads, tokens].
#version 450
#include "kiln.glsl"
#define AFTER_UPDATE 0
#include "linear_sequential.glsl"
