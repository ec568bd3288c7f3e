//! Events in the form that vLLM gives them since 0.23: an array of time, events and rank, each event a map in MessagePack.

use std::time::{SystemTime, UNIX_EPOCH};

use kiln_engine::arch::PAGE;
use kiln_engine::run::{CacheEvent, CacheTier};
use serde::Serialize;

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event<'e> {
    BlockStored {
        block_hashes: &'e [u64],
        parent_block_hash: Option<u64>,
        token_ids: &'e [u32],
        block_size: usize,
        lora_id: Option<u64>,
        medium: &'static str,
        lora_name: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<[String; 1]>>,
    },
    BlockRemoved {
        block_hashes: &'e [u64],
        medium: &'static str,
    },
    AllBlocksCleared {},
}

fn medium(tier: CacheTier) -> &'static str {
    match tier {
        CacheTier::Device => "GPU",
        CacheTier::Host => "CPU",
    }
}

impl<'e> From<&'e CacheEvent> for Event<'e> {
    fn from(event: &'e CacheEvent) -> Event<'e> {
        match event {
            CacheEvent::Stored(pages) => Event::BlockStored {
                block_hashes: &pages.hashes,
                parent_block_hash: pages.parent,
                token_ids: &pages.tokens,
                block_size: PAGE,
                lora_id: None,
                medium: medium(pages.tier),
                lora_name: None,
                // Of each page who finds it, as vLLM has salts and adapters there.
                extra_keys: (pages.scope != 0)
                    .then(|| pages.hashes.iter().map(|_| [format!("{:016x}", pages.scope)]).collect()),
            },
            CacheEvent::Removed { hashes, tier } => Event::BlockRemoved { block_hashes: hashes, medium: medium(*tier) },
            CacheEvent::Cleared => Event::AllBlocksCleared {},
        }
    }
}

/// A batch of events that happened now.
pub(super) fn encode(events: &[CacheEvent]) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let events: Vec<Event<'_>> = events.iter().map(Event::from).collect();
    // Writing to memory does not fail, and all of these types have a form.
    rmp_serde::to_vec_named(&(now, events, 0)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use kiln_engine::run::StoredPages;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn events_have_the_names_and_the_order_of_vllm() {
        let pages = StoredPages {
            hashes: vec![u64::MAX, 2],
            parent: None,
            tokens: vec![1; 2 * PAGE],
            tier: CacheTier::Device,
            scope: 0,
        };
        let other =
            StoredPages { hashes: vec![3], parent: Some(2), tokens: Vec::new(), tier: CacheTier::Host, scope: 7 };
        let removed = CacheEvent::Removed { hashes: vec![2], tier: CacheTier::Host };
        let events = [CacheEvent::Stored(pages), CacheEvent::Stored(other), removed, CacheEvent::Cleared];
        let told: Value = rmp_serde::from_slice(&encode(&events)).unwrap();
        assert!(told[0].as_f64().unwrap() > 1.7e9 && told[2] == 0, "{told}");
        let stored = json!({
            "type": "BlockStored", "block_hashes": [u64::MAX, 2], "parent_block_hash": null, "token_ids": vec![1; 128], "block_size": 64,
            "lora_id": null, "medium": "GPU", "lora_name": null,
        });
        assert_eq!(told[1][0], stored);
        assert_eq!((&told[1][1]["extra_keys"], &told[1][1]["medium"]), (&json!([["0000000000000007"]]), &json!("CPU")));
        assert_eq!(told[1][2], json!({"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"}));
        assert_eq!(told[1][3], json!({"type": "AllBlocksCleared"}));
    }
}
