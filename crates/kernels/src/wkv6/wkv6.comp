// wkv6, token after token: y_t = r_t (S + tf k_t^T v_t), then S = td_t S + k_t^T v_t, S the state [value, key].
// k, v, r, td: [S, heads, tokens]; tf: [S, heads]; states: [S values, S keys, heads, sequences].
#version 450
#include "kiln.glsl"
#define AFTER_UPDATE 0
#include "linear_sequential.glsl"
