// How far pair number `pair` has turned at a position: phases, their cosines and sines. `p.freqs`: [2, pairs], high and low
// word of a 64-bit fraction of a turn.
// The phase is a whole number that wraps at a full turn, so far positions lose nothing, and sin and cos are polynomials
// on an eighth of a turn because drivers may be wrong by 2^-11 there.

// position * turn, modulo a full turn, which is 2^32.
uint phase_of(int position, uint pair) {
    uint high = U32(p.freqs).v[2 * pair], low = U32(p.freqs).v[2 * pair + 1];
    uint carried, ignored, n = uint(abs(position));
    umulExtended(n, low, carried, ignored);
    uint phase = n * high + carried;
    return position < 0 ? -phase : phase;
}

vec2 cos_sin(uint phase) {
    uint quarter = (phase + 0x20000000u) >> 30;
    float t = float(int(phase - (quarter << 30))) * 1.4629180792671596e-9; // 2 pi / 2^32
    float t2 = t * t;
    float s = t + t * t2 * (-1.6666667e-1 + t2 * (8.3333333e-3 + t2 * (-1.9841270e-4 + t2 * 2.7557319e-6)));
    float c = 1.0 + t2 * (-0.5 + t2 * (4.1666667e-2 + t2 * (-1.3888889e-3 + t2 * 2.4801587e-5)));
    vec2 turned = (quarter & 1u) == 0 ? vec2(c, s) : vec2(-s, c);
    return quarter < 2 ? turned : -turned;
}
