//! The sampling settings that a model's file brings.

use kiln_engine::model::Model;
use kiln_engine::sampler::Sampling;

/// The settings that a model's authors recommend in its file (`general.sampling.*`), else the usual ones.
pub fn file_sampling(model: &Model) -> Sampling {
    let metadata = model.gguf.metadata();
    let number = |key: &str| metadata.value(&format!("general.sampling.{key}"));
    let float = |key: &str| number(key).and_then(|v| v.as_float().or(v.as_int().map(|i| i as f64))).map(|v| v as f32);
    let mut s = Sampling::default();
    let floats: [(&str, &mut f32); 6] = [
        ("temp", &mut s.temperature),
        ("top_p", &mut s.top_p),
        ("min_p", &mut s.min_p),
        ("penalty_repeat", &mut s.repeat_penalty),
        ("xtc_probability", &mut s.xtc_probability),
        ("xtc_threshold", &mut s.xtc_threshold),
    ];
    for (key, field) in floats {
        *field = float(key).unwrap_or(*field);
    }
    s.top_k = float("top_k").map_or(s.top_k, |v| v as i32);
    s.repeat_last_n = float("penalty_last_n").map_or(s.repeat_last_n, |v| v as i32);
    if let Err(error) = s.check(model.config.vocab) {
        log::warn!("the model's own sampling settings are not used: {error}");
        return Sampling::default();
    }
    s
}
