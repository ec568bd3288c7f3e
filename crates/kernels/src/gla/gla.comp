// gla, token after token: S = td_t S + k_t^T v_t, then y_t = scale r_t S, S the state [value, key].
// k, v, r, td: [S, heads, tokens]; states: [S values, S keys, heads, sequences].
#version 450
#include "kiln.glsl"
#define AFTER_UPDATE 1
#include "linear_sequential.glsl"
