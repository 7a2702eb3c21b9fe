//! The file in which a node keeps its membership across restarts of its daemon.
//!
//! The file consists of `HfMember`, a version byte, a `u32` length (big endian) of the content, the content in postcard,
//! and the SHA-256 digest of all that precedes. The digest finds damage; the names find a file of another node or group.

use crate::membership_frames::{MembershipState, MembershipStateError, NodeName};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const MAGIC: [u8; 8] = *b"HfMember";
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 13;
const DIGEST_BYTES: usize = 32;
/// Maximum length of the file, in bytes: two views with group data of the maximum length, and the rest.
pub const SAVED_MEMBERSHIP_BYTES_MAX: usize = 4 << 20;

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedMembership {
    /// Name of the group.
    pub group: String,
    /// Name of the node.
    pub node: NodeName,
    /// The node's state.
    pub state: MembershipState,
}

#[derive(Serialize, Deserialize)]
struct Content<'a> {
    group: &'a str,
    node: NodeName,
    state: &'a [u8],
}

/// Reason for which a file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SavedMembershipError {
    /// The file was not written by Holdfast.
    #[error("is not a saved membership; remove the file, and the node joins the group anew")]
    Foreign,
    /// A newer release wrote the file.
    #[error(
        "has version {0}, and this release reads version {VERSION}; run the release that wrote the file"
    )]
    Newer(u8),
    /// The file is incomplete or was changed.
    #[error("is damaged; check the disk, remove the file, and the node joins the group anew")]
    Damaged,
    /// The state in the file is impossible.
    #[error(transparent)]
    State(#[from] MembershipStateError),
}

impl SavedMembership {
    /// Returns the bytes of the file.
    ///
    /// # Errors
    /// The state cannot be encoded, which would be a defect of this crate.
    pub fn encode(&self) -> Result<Vec<u8>, SavedMembershipError> {
        let state = self.state.encode()?;
        let content = Content {
            group: &self.group,
            node: self.node.clone(),
            state: &state,
        };
        let mut bytes = Vec::with_capacity(HEAD_BYTES + state.len() + 128);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        bytes.extend_from_slice(&[0; 4]);
        let encoded = postcard::to_extend(&content, bytes);
        let mut bytes = encoded.map_err(|_| SavedMembershipError::Damaged)?;
        let length = (bytes.len() - HEAD_BYTES) as u32;
        bytes[HEAD_BYTES - 4..HEAD_BYTES].copy_from_slice(&length.to_be_bytes());
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        Ok(bytes)
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn decode(bytes: &[u8]) -> Result<SavedMembership, SavedMembershipError> {
        let (magic, rest) = bytes
            .split_first_chunk::<8>()
            .ok_or(SavedMembershipError::Foreign)?;
        if *magic != MAGIC {
            return Err(SavedMembershipError::Foreign);
        }
        let (version, _) = rest.split_first().ok_or(SavedMembershipError::Damaged)?;
        match *version {
            VERSION => {}
            0 => return Err(SavedMembershipError::Damaged),
            newer => return Err(SavedMembershipError::Newer(newer)),
        }
        let content = checked_content(bytes).ok_or(SavedMembershipError::Damaged)?;
        let (content, excess) = postcard::take_from_bytes::<Content<'_>>(content)
            .map_err(|_| SavedMembershipError::Damaged)?;
        if !excess.is_empty() {
            return Err(SavedMembershipError::Damaged);
        }
        Ok(SavedMembership {
            group: content.group.to_owned(),
            node: content.node,
            state: MembershipState::decode(content.state)?,
        })
    }
}

/// Returns the content if length and digest are right.
fn checked_content(bytes: &[u8]) -> Option<&[u8]> {
    let (covered, digest) = bytes.split_at_checked(bytes.len().checked_sub(DIGEST_BYTES)?)?;
    let (head, content) = covered.split_at_checked(HEAD_BYTES)?;
    let length = u32::from_be_bytes(*head.last_chunk::<4>()?);
    let is_whole = usize::try_from(length) == Ok(content.len());
    (is_whole && Sha256::digest(covered)[..] == *digest).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership_frames::JoinNumber;
    use proptest::prelude::*;

    fn saved() -> SavedMembership {
        SavedMembership {
            group: "files".to_owned(),
            node: "n1".parse().unwrap(),
            state: MembershipState {
                join: Some(JoinNumber(7)),
                ..MembershipState::default()
            },
        }
    }

    #[test]
    fn saved_membership_is_read_back() {
        let bytes = saved().encode().unwrap();
        assert_eq!(SavedMembership::decode(&bytes), Ok(saved()));
    }

    #[test]
    fn file_of_a_newer_release_is_named_as_such() {
        let mut bytes = saved().encode().unwrap();
        bytes[8] = 2;
        let error = SavedMembership::decode(&bytes).unwrap_err();
        assert_eq!(error, SavedMembershipError::Newer(2));
    }

    #[test]
    fn incomplete_or_foreign_file_is_refused() {
        let bytes = saved().encode().unwrap();
        for length in 0..bytes.len() {
            SavedMembership::decode(&bytes[..length]).unwrap_err();
        }
        let zeros = vec![0; bytes.len()];
        let error = SavedMembership::decode(&zeros).unwrap_err();
        assert_eq!(error, SavedMembershipError::Foreign);
    }

    proptest! {
        #[test]
        fn changed_file_is_refused(at: prop::sample::Index, bit in 0..8_u8) {
            let mut bytes = saved().encode().unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(SavedMembership::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
            let _ = SavedMembership::decode(&bytes);
        }
    }
}
