//! Comparison of two nodes that connect: some differences keep the nodes apart, others are told to the operator.

use core::fmt;
use core::time::Duration;
use holdfast_wire::greeting::{GreetingRefusal, GroupMode, NodeFacts};

/// Difference of two clocks from which the operator is told. Certificates and epochs allow for much more.
pub const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(5);

/// A difference that does not keep nodes apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disagreement {
    /// The clocks differ.
    Clock {
        /// Difference in seconds; positive if the peer's clock is ahead.
        ahead_s: i64,
    },
    /// The services or their weights differ.
    Services,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disagreement::Clock { ahead_s } => {
                let (seconds, side) = match *ahead_s {
                    ahead if ahead >= 0 => (ahead, "ahead of"),
                    behind => (-behind, "behind"),
                };
                write!(
                    f,
                    "its clock is {seconds} s {side} this node's; set the clocks of both hosts, for example with chrony"
                )
            }
            Disagreement::Services => f.write_str(
                "its file has other services or weights; make [[service]] equal on all nodes, and restart the daemons",
            ),
        }
    }
}

/// Compares the facts of the node that dialled with those of the node that was dialled. The clocks are compared as the
/// peer's against this node's; `is_dialler` tells which of the two this node is.
///
/// # Errors
/// The reason for which the nodes must not talk to each other, the same at both ends.
pub fn compare(
    own: &NodeFacts,
    peer: &NodeFacts,
    is_dialler: bool,
) -> Result<Vec<Disagreement>, GreetingRefusal> {
    let mut disagreements = Vec::new();
    match (own.mode, peer.mode) {
        (Some(GroupMode::Configured(own)), Some(GroupMode::Configured(peer))) => {
            if own.contact != peer.contact {
                let (listener, dialler) = match is_dialler {
                    true => (peer.contact, own.contact),
                    false => (own.contact, peer.contact),
                };
                return Err(GreetingRefusal::Contact { listener, dialler });
            }
            if own.reach != peer.reach {
                return Err(GreetingRefusal::Reach);
            }
            if own.services != peer.services {
                disagreements.push(Disagreement::Services);
            }
        }
        (Some(GroupMode::Configured(_)), Some(GroupMode::SelfRunning))
        | (Some(GroupMode::SelfRunning), Some(GroupMode::Configured(_))) => {
            return Err(GreetingRefusal::ConfiguredAndSelfRun);
        }
        (Some(GroupMode::SelfRunning), Some(GroupMode::SelfRunning)) | (None, _) | (_, None) => {}
    }
    let apart_ms = own.clock_ms.abs_diff(peer.clock_ms);
    let are_known = own.clock_ms != 0 && peer.clock_ms != 0;
    if are_known && Duration::from_millis(apart_ms) > CLOCK_DIFFERENCE_MAX {
        let seconds = i64::try_from(apart_ms / 1_000).unwrap_or(i64::MAX);
        let ahead_s = match peer.clock_ms > own.clock_ms {
            true => seconds,
            false => -seconds,
        };
        disagreements.push(Disagreement::Clock { ahead_s });
    }
    Ok(disagreements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_wire::NodeId;
    use holdfast_wire::greeting::ConfiguredSettings;

    fn facts(contact: u16, clock_ms: u64) -> NodeFacts {
        NodeFacts {
            release: "1".to_owned(),
            clock_ms,
            mode: Some(configured(contact, 1, 1)),
        }
    }

    fn configured(contact: u16, reach: u64, services: u64) -> GroupMode {
        GroupMode::Configured(ConfiguredSettings {
            contact: NodeId(contact),
            reach,
            services,
        })
    }

    #[test]
    fn equal_nodes_agree() {
        let now = 1_800_000_000_000;
        assert_eq!(
            compare(&facts(1, now), &facts(1, now + 5_000), true),
            Ok(vec![])
        );
        let self_running = NodeFacts {
            mode: Some(GroupMode::SelfRunning),
            ..facts(1, now)
        };
        assert_eq!(compare(&self_running, &self_running, false), Ok(vec![]));
        // A node that tells nothing is not judged.
        let unknown = NodeFacts::default();
        assert_eq!(compare(&facts(1, now), &unknown, false), Ok(vec![]));
    }

    #[test]
    fn both_ends_give_the_same_reason() {
        let (first, second) = (facts(1, 1), facts(2, 1));
        let reason = compare(&first, &second, true);
        assert_eq!(reason, compare(&second, &first, false));
        let (listener, dialler) = (NodeId(2), NodeId(1));
        assert_eq!(reason, Err(GreetingRefusal::Contact { listener, dialler }));
        let mut other_reach = facts(1, 1);
        other_reach.mode = Some(configured(1, 2, 1));
        assert_eq!(
            compare(&first, &other_reach, true),
            Err(GreetingRefusal::Reach)
        );
        let self_running = NodeFacts {
            mode: Some(GroupMode::SelfRunning),
            ..first.clone()
        };
        let refused = compare(&first, &self_running, true);
        assert_eq!(refused, Err(GreetingRefusal::ConfiguredAndSelfRun));
    }

    #[test]
    fn differing_clocks_and_services_are_told() {
        let now = 1_800_000_000_000;
        let mut other = facts(1, now + 93_500);
        other.mode = Some(configured(1, 1, 2));
        let told = compare(&facts(1, now), &other, true).unwrap();
        let clock = Disagreement::Clock { ahead_s: 93 };
        assert_eq!(told, [Disagreement::Services, clock.clone()]);
        assert!(clock.to_string().starts_with("its clock is 93 s ahead of"));
        let back = compare(&other, &facts(1, now), false).unwrap();
        assert_eq!(back[1], Disagreement::Clock { ahead_s: -93 });
        assert!(back[1].to_string().starts_with("its clock is 93 s behind"));
        // A node without a clock is not judged.
        assert_eq!(compare(&facts(1, now), &facts(1, 0), true), Ok(vec![]));
    }
}
