//! Sizes over the limit that are temporarily tolerated: they may shrink, never grow.
//!
//! `xtask/ratchet.toml` lists them. A new line there is a decision, so it is written by hand; `cargo xtask tidy
//! --ratchet` only lowers and removes lines.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::Finding;
use super::sizes::{self, Kind, Offender};
use crate::tree::Tree;

const PATH: &str = "xtask/ratchet.toml";

const HEADING: &str = "\
# Files and functions over their limits (xtask/src/tidy/sizes.rs), with their present sizes in lines.
# They may only shrink: `cargo xtask tidy --ratchet` lowers the numbers and drops what is within its limit.
# A new entry is written by hand, and needs a reason in the commit that adds it.

";

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Ratchet {
    files: BTreeMap<String, usize>,
    functions: BTreeMap<String, usize>,
}

impl Ratchet {
    fn read(tree: &Tree) -> Result<Ratchet, Finding> {
        let text = tree
            .files
            .get(PATH)
            .and_then(Option::as_deref)
            .unwrap_or("");
        toml::from_str(text).map_err(|error| Finding::new(PATH, 0, error.to_string()))
    }

    fn entries(&self, kind: Kind) -> &BTreeMap<String, usize> {
        match kind {
            Kind::File => &self.files,
            Kind::Function => &self.functions,
        }
    }
}

/// Checks that everything over its limit is listed with exactly its size, and nothing else is listed.
pub fn check(tree: &Tree, offenders: &[Offender]) -> Vec<Finding> {
    let ratchet = match Ratchet::read(tree) {
        Ok(ratchet) => ratchet,
        Err(finding) => return vec![finding],
    };
    let mut findings = Vec::new();
    for offender in offenders {
        let (lines, limit) = (offender.lines, offender.kind.lines_max());
        let message = match ratchet.entries(offender.kind).get(&offender.key) {
            None => format!("{} has {lines} lines, the limit is {limit}", offender.key),
            Some(listed) if lines > *listed => {
                format!(
                    "{} grew from {listed} to {lines} lines, the limit is {limit}",
                    offender.key
                )
            }
            Some(_) => continue,
        };
        findings.push(Finding::new(&offender.path, offender.line, message));
    }
    for kind in [Kind::File, Kind::Function] {
        for (key, listed) in ratchet.entries(kind) {
            if present(offenders, kind, key).is_none_or(|lines| lines < *listed) {
                let message = format!(
                    "{key} is smaller than the {listed} lines listed: run `cargo xtask tidy --ratchet`"
                );
                findings.push(Finding::new(PATH, 0, message));
            }
        }
    }
    findings
}

/// Returns the size of a listed offender, if it still exceeds the limit.
fn present(offenders: &[Offender], kind: Kind, key: &str) -> Option<usize> {
    // Two functions of one name in a file share an entry; the longer one counts.
    let of_key = offenders
        .iter()
        .filter(|offender| offender.kind == kind && offender.key == key);
    of_key.map(|offender| offender.lines).max()
}

/// Lowers the listed sizes to the present ones, in the tree and on disk.
pub fn lower(tree: &mut Tree) -> Result<()> {
    let text = {
        let mut ratchet = Ratchet::read(tree).map_err(|finding| anyhow::anyhow!("{finding}"))?;
        let (sources, _) = super::source::parse(tree);
        let offenders = sizes::measure(tree, &sources);
        lowered(&mut ratchet.files, &offenders, Kind::File);
        lowered(&mut ratchet.functions, &offenders, Kind::Function);
        format!("{HEADING}{}", toml::to_string(&ratchet)?)
    };
    std::fs::write(tree.root.join(PATH), &text).context(PATH)?;
    tree.files.insert(PATH.into(), Some(text));
    Ok(())
}

fn lowered(entries: &mut BTreeMap<String, usize>, offenders: &[Offender], kind: Kind) {
    entries.retain(|key, listed| match present(offenders, kind, key) {
        Some(lines) => {
            *listed = lines.min(*listed);
            true
        }
        None => false,
    });
}

#[cfg(test)]
mod tests {
    use super::super::fixture::tree;
    use super::*;

    fn offender(lines: usize) -> Offender {
        Offender {
            kind: Kind::Function,
            key: "a.rs::f".into(),
            path: "a.rs".into(),
            line: 1,
            lines,
        }
    }

    fn messages(listed: &str, offenders: &[Offender]) -> Vec<String> {
        check(&tree(&[(PATH, listed)]), offenders)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn an_unlisted_offender_is_found() {
        assert_eq!(
            messages("", &[offender(170)]),
            ["a.rs::f has 170 lines, the limit is 100"]
        );
    }

    #[test]
    fn a_listed_offender_passes_at_its_size_and_may_not_grow() {
        let listed = "[functions]\n\"a.rs::f\" = 170\n";
        assert!(messages(listed, &[offender(170)]).is_empty());
        assert_eq!(
            messages(listed, &[offender(171)]),
            ["a.rs::f grew from 170 to 171 lines, the limit is 100"]
        );
    }

    #[test]
    fn an_offender_that_shrank_or_went_must_be_lowered() {
        let listed = "[functions]\n\"a.rs::f\" = 170\n";
        assert!(messages(listed, &[offender(169)])[0].contains("--ratchet"));
        assert!(messages(listed, &[])[0].contains("--ratchet"));
    }

    #[test]
    fn lowering_never_raises_and_drops_what_is_gone() {
        let mut entries = BTreeMap::from([("a.rs::f".to_owned(), 70), ("b.rs::g".to_owned(), 90)]);
        lowered(&mut entries, &[offender(65)], Kind::Function);
        assert_eq!(entries, BTreeMap::from([("a.rs::f".to_owned(), 65)]));
        lowered(&mut entries, &[offender(80)], Kind::Function);
        assert_eq!(entries["a.rs::f"], 65);
    }

    #[test]
    fn a_broken_list_is_found() {
        assert_eq!(messages("[functoins]\n", &[]).len(), 1);
    }
}
