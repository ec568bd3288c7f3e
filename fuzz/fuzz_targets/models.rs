//! A file whose header holds is a model or refused: hyper-parameters, shapes, vocabularies, and the plans that come of them.

#![no_main]

use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::lower::{Target, lower};
use kiln_engine::model::Model;
use kiln_gguf::Gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes(bytes.to_vec()) else { return };
    let Ok(model) = Model::new(gguf) else { return };
    let Ok(graph) = model.graph(&Room::for_sequences(2, 64)) else { return };
    for shape in [BatchShape::new(1, 1), BatchShape::new(9, 1)] {
        let Ok(plan) = graph.plan(shape) else { continue };
        plan.check().expect("a plan that was made is sound");
        if let Ok(lowered) = lower(plan, &Target::cpu()) {
            lowered.check().expect("a plan that was lowered is sound");
        }
    }
});
