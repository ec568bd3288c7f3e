//! The software bill of materials: what the binary is made of, as CycloneDX 1.6 in JSON.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::archive::hex;
use crate::project::{BINARY, Crate, Project};

/// The bill of the binary with this checksum.
pub(crate) fn bill(project: &Project, binary_sha256: &str) -> anyhow::Result<Vec<u8>> {
    let main = project.crates.iter().find(|one| one.name == BINARY);
    let mut main = component(main.ok_or_else(|| anyhow::anyhow!("no crate `kiln`"))?, "application");
    main["hashes"] = json!([{"alg": "SHA-256", "content": binary_sha256}]);
    let mut components: Vec<Value> =
        project.crates.iter().filter(|one| one.name != BINARY).map(|one| component(one, "library")).collect();
    let mut dependencies: Vec<Value> = project
        .crates
        .iter()
        .map(|one| {
            let mut uses: Vec<String> = one.uses.iter().map(|(name, version)| purl(name, version)).collect();
            uses.extend(bundled(one).map(|(reference, _)| reference));
            json!({"ref": purl(&one.name, &one.version), "dependsOn": uses})
        })
        .collect();
    for (reference, component) in project.crates.iter().filter_map(bundled) {
        components.push(component);
        dependencies.push(json!({"ref": reference, "dependsOn": []}));
    }
    let mut bill = json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": timestamp(project.time),
            "tools": {"components": [{"type": "application", "name": "xtask", "version": project.version}]},
            "component": main,
        },
        "components": components,
        "dependencies": dependencies,
    });
    // A number that only this bill has, and that it has whenever it is made.
    let digest = hex(&Sha256::digest(bill.to_string()));
    let variant =
        format!("{}-{}-8{}-8{}-{}", &digest[..8], &digest[8..12], &digest[12..15], &digest[15..18], &digest[18..30]);
    bill["serialNumber"] = json!(format!("urn:uuid:{variant}"));
    let mut text = serde_json::to_vec_pretty(&bill)?;
    text.push(b'\n');
    Ok(text)
}

fn purl(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

fn component(one: &Crate, kind: &str) -> Value {
    let mut component = json!({
        "type": kind,
        "bom-ref": purl(&one.name, &one.version),
        "name": one.name,
        "version": one.version,
        "purl": purl(&one.name, &one.version),
    });
    if let Some(licence) = &one.licence {
        // Old manifests separate alternatives with a slash, which SPDX does not know.
        component["licenses"] = json!([{"expression": licence.replace(" / ", " OR ").replace('/', " OR ")}]);
    }
    if let Some(checksum) = &one.checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    component
}

/// C++ code that comes inside a crate, which cargo does not know of: the crate's version ends with the commit.
fn bundled(one: &Crate) -> Option<(String, Value)> {
    let commit = one.version.split_once('+').filter(|_| one.name == "glslang-sys")?.1;
    let reference = format!("pkg:github/KhronosGroup/glslang@{commit}");
    let component = json!({
        "type": "library", "bom-ref": reference, "name": "glslang", "version": commit, "purl": reference,
        "description": "C++ sources inside the crate glslang-sys",
    });
    Some((reference, component))
}

/// Seconds since 1970 as RFC 3339 writes them.
fn timestamp(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let is_leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(timestamp(4_107_542_399), "2100-02-28T23:59:59Z");
        assert_eq!(timestamp(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn every_dependency_of_the_bill_is_one_of_its_components() {
        let project = Project::read(crate::machine::Machine::X86).unwrap();
        let bytes = bill(&project, "00").unwrap();
        assert_eq!(bytes, bill(&project, "00").unwrap());
        let bill: Value = serde_json::from_slice(&bytes).unwrap();
        let components = bill["components"].as_array().unwrap();
        let known = |reference: &Value| {
            reference == &bill["metadata"]["component"]["bom-ref"]
                || components.iter().any(|c| &c["bom-ref"] == reference)
        };
        for dependency in bill["dependencies"].as_array().unwrap() {
            assert!(known(&dependency["ref"]), "{}", dependency["ref"]);
            assert!(dependency["dependsOn"].as_array().unwrap().iter().all(known), "{dependency}");
        }
        assert!(components.iter().any(|c| c["name"] == "glslang" && c["purl"].as_str().unwrap().contains("github")));
        // Crates that are linked in without a licence would be a surprise.
        let foreign = components.iter().filter(|c| c["hashes"].is_array());
        assert!(foreign.clone().count() > 100);
        assert!(
            foreign.clone().all(|c| c["licenses"].is_array()),
            "{:?}",
            foreign.filter(|c| !c["licenses"].is_array()).count()
        );
    }
}
