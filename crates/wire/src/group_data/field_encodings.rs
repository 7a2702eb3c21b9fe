//! Encodings of fields of the group's settings: weights in the order of names, and policies as numbers.

/// Weights as a list in the order of names, so that equal settings have equal bytes.
pub(super) mod bounded_weights {
    use crate::frame::bounded_list_of;
    use crate::membership_frames::{NodeName, SERVER_NODES_MAX, VOTERS_MAX};
    use serde::de::Error;
    use serde::{Deserializer, Serializer};
    use std::collections::BTreeMap;

    /// Maximum number of weights: one for each node that a group can have.
    pub const WEIGHTS_MAX: usize = SERVER_NODES_MAX + VOTERS_MAX;

    pub fn serialize<S: Serializer>(
        weights: &BTreeMap<NodeName, u32>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(weights)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<NodeName, u32>, D::Error> {
        let list = bounded_list_of::<D, (NodeName, u32), WEIGHTS_MAX>(deserializer)?;
        if !list.is_sorted_by(|(left, _), (right, _)| left < right) {
            return Err(D::Error::custom("weights are not in the order of names"));
        }
        Ok(list.into_iter().collect())
    }
}

/// A policy as its number (RFC 5356, and rsplib's private range).
pub(super) mod policy_number {
    use crate::rserpool::PolicyKind;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(kind: &PolicyKind, serializer: S) -> Result<S::Ok, S::Error> {
        kind.number().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PolicyKind, D::Error> {
        let number = u32::deserialize(deserializer)?;
        PolicyKind::from_number(number).ok_or_else(|| D::Error::custom("the policy is unknown"))
    }
}
