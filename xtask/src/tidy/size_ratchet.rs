//! Sizes over the limit that are temporarily tolerated: they may shrink, never grow.
//!
//! `xtask/ratchet.toml` lists them. A new line there is a decision, so it is written by hand; `cargo xtask tidy
//! --ratchet` only lowers and removes lines.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::Finding;
use super::size_limits::{self, OversizedItem, SizedItem};
use crate::source_tree::SourceTree;

const PATH: &str = "xtask/ratchet.toml";

const HEADING: &str = "\
# Files and functions over their limits (xtask/src/tidy/size_limits.rs), with their present sizes in lines.
# They may only shrink: `cargo xtask tidy --ratchet` lowers the numbers and drops what is within its limit.
# A new entry is written by hand, and needs a reason in the commit that adds it.

";

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SizeRatchet {
    files: BTreeMap<String, usize>,
    functions: BTreeMap<String, usize>,
}

impl SizeRatchet {
    fn read(tree: &SourceTree) -> Result<SizeRatchet, Finding> {
        let text = tree
            .files
            .get(PATH)
            .and_then(Option::as_deref)
            .unwrap_or("");
        toml::from_str(text).map_err(|error| Finding::new(PATH, 0, error.to_string()))
    }

    fn entries(&self, kind: SizedItem) -> &BTreeMap<String, usize> {
        match kind {
            SizedItem::File => &self.files,
            SizedItem::Function => &self.functions,
        }
    }
}

/// Checks that everything over its limit is listed with exactly its size, and nothing else is listed.
pub fn check(tree: &SourceTree, offenders: &[OversizedItem]) -> Vec<Finding> {
    let ratchet = match SizeRatchet::read(tree) {
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
    for kind in [SizedItem::File, SizedItem::Function] {
        for (key, listed) in ratchet.entries(kind) {
            if current_size(offenders, kind, key).is_none_or(|lines| lines < *listed) {
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
fn current_size(offenders: &[OversizedItem], kind: SizedItem, key: &str) -> Option<usize> {
    // Two functions of one name in a file share an entry; the longer one counts.
    let of_key = offenders
        .iter()
        .filter(|offender| offender.kind == kind && offender.key == key);
    of_key.map(|offender| offender.lines).max()
}

/// Lowers the listed sizes to the present ones, in the tree and on disk.
pub fn lower_sizes(tree: &mut SourceTree) -> Result<()> {
    let text = {
        let mut ratchet =
            SizeRatchet::read(tree).map_err(|finding| anyhow::anyhow!("{finding}"))?;
        let (sources, _) = super::rust_file::parse(tree);
        let offenders = size_limits::find_oversized_items(tree, &sources);
        lower_entries(&mut ratchet.files, &offenders, SizedItem::File);
        lower_entries(&mut ratchet.functions, &offenders, SizedItem::Function);
        format!("{HEADING}{}", toml::to_string(&ratchet)?)
    };
    std::fs::write(tree.root.join(PATH), &text).context(PATH)?;
    tree.files.insert(PATH.into(), Some(text));
    Ok(())
}

fn lower_entries(
    entries: &mut BTreeMap<String, usize>,
    offenders: &[OversizedItem],
    kind: SizedItem,
) {
    entries.retain(|key, listed| match current_size(offenders, kind, key) {
        Some(lines) => {
            *listed = lines.min(*listed);
            true
        }
        None => false,
    });
}

#[cfg(test)]
mod tests {
    use super::super::test_tree::tree;
    use super::*;

    fn offender(lines: usize) -> OversizedItem {
        OversizedItem {
            kind: SizedItem::Function,
            key: "a.rs::f".into(),
            path: "a.rs".into(),
            line: 1,
            lines,
        }
    }

    fn messages(ratchet_text: &str, offenders: &[OversizedItem]) -> Vec<String> {
        check(&tree(&[(PATH, ratchet_text)]), offenders)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn unlisted_offender_is_found() {
        assert_eq!(
            messages("", &[offender(170)]),
            ["a.rs::f has 170 lines, the limit is 100"]
        );
    }

    #[test]
    fn listed_offender_passes_unless_it_grows() {
        let listed = "[functions]\n\"a.rs::f\" = 170\n";
        assert!(messages(listed, &[offender(170)]).is_empty());
        assert_eq!(
            messages(listed, &[offender(171)]),
            ["a.rs::f grew from 170 to 171 lines, the limit is 100"]
        );
    }

    #[test]
    fn shrunken_or_removed_offender_is_found() {
        let listed = "[functions]\n\"a.rs::f\" = 170\n";
        assert!(messages(listed, &[offender(169)])[0].contains("--ratchet"));
        assert!(messages(listed, &[])[0].contains("--ratchet"));
    }

    #[test]
    fn lowering_never_raises_and_drops_removed() {
        let mut entries = BTreeMap::from([("a.rs::f".to_owned(), 70), ("b.rs::g".to_owned(), 90)]);
        lower_entries(&mut entries, &[offender(65)], SizedItem::Function);
        assert_eq!(entries, BTreeMap::from([("a.rs::f".to_owned(), 65)]));
        lower_entries(&mut entries, &[offender(80)], SizedItem::Function);
        assert_eq!(entries["a.rs::f"], 65);
    }

    #[test]
    fn malformed_list_is_found() {
        assert_eq!(messages("[functoins]\n", &[]).len(), 1);
    }
}
