// Functions of one float, finite for every finite input: nothing overflows on the way to a result that does not.
// The definitions are those of `unary/reference.rs`.

float sigmoid(float x) {
    float e = exp(-abs(x));
    return (x >= 0.0 ? 1.0 : e) / (1.0 + e);
}

float silu(float x) { return x * sigmoid(x); }

// 1 + tanh(u) is 2 sigmoid(2u), without the cancellation for negative u.
float gelu(float x) { return x * sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x)); }

float gelu_quick(float x) { return x * sigmoid(1.702 * x); }

// erfc(z) for z >= 0, to 3e-7 of its value: exp(-z^2) t P(t) with t = 1 / (1 + z/2); P fitted to erfc for z up to 11.
float erfc_positive(float z) {
    float t = 1.0 / (1.0 + 0.5 * z);
    float s = -0.05927750840783119;
    s = fma(s, t, 0.2855934500694275);
    s = fma(s, t, -0.48931074142456055);
    s = fma(s, t, 0.28048408031463623);
    s = fma(s, t, -0.028291821479797363);
    s = fma(s, t, 0.2033921778202057);
    s = fma(s, t, 0.2429254800081253);
    s = fma(s, t, 0.2823998034000397);
    s = fma(s, t, 0.28208503127098083);
    return t * s * exp(-z * z);
}

// x times the normal distribution function, taken from its smaller tail.
float gelu_erf(float x) {
    float tail = 0.5 * erfc_positive(min(abs(x) * 0.7071067811865476, 16.0));
    return x * (x >= 0.0 ? 1.0 - tail : tail);
}

float relu(float x) { return max(x, 0.0); }

float relu2(float x) {
    float r = max(x, 0.0);
    return r * r;
}

// The built-in may be sinh / cosh, which is NaN for large x.
float tanh_of(float x) {
    float q = x * x;
    float e = exp(-2.0 * abs(x));
    float s = fma(fma(fma(fma(-0.005704042501747608, q, 0.020637862384319305), q, -0.05373915657401085), q,
        0.133314311504364), q, -0.3333328068256378);
    return abs(x) < 0.625 ? fma(x * q, s, x) : sign(x) * (1.0 - e) / (1.0 + e);
}

// log(1 + e^x); the series keeps small results exact where 1 + e would round them away.
float softplus(float x) {
    float e = exp(-abs(x));
    float series = e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25)));
    return max(x, 0.0) + (e < 0.01 ? series : log(1.0 + e));
}

// e^x - 1 for x < 0.
float elu(float x) {
    float series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * 0.041666667)));
    return x >= 0.0 ? x : x > -0.03 ? series : exp(x) - 1.0;
}

float hard_sigmoid(float x) { return clamp(x / 6.0 + 0.5, 0.0, 1.0); }
float hard_swish(float x) { return x * hard_sigmoid(x); }
float negative(float x) { return -x; }
float square(float x) { return x * x; }
float above_zero(float x) { return x > 0.0 ? 1.0 : 0.0; }
float exp_neg_exp(float x) { return exp(-exp(x)); }
float exp_neg_sigmoid(float x) { return exp(-0.606531 * sigmoid(x)); }
