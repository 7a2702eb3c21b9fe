//! The settings of a group, which are the content of [`crate::membership_frames::GroupData`]: the services.
//!
//! Settings change only by [`GroupSettings::apply`], a pure function that the contact node calls before a vote.

mod change;
mod checks;
mod field_encodings;
mod replication;
mod service;

pub use change::{
    GroupChange, GroupChangeId, GroupChangeRefusal, GroupNodes, ServicePatch, WeightChanges,
};
pub use checks::{
    CHECK_INTERVAL_MS, CHECK_RESULTS, CHECK_TIMEOUT_MS, SCRIPT_NAME_BYTES_MAX, STALL_MS_MAX,
    ScriptName, ScriptNameError, ServiceChecks,
};
pub use field_encodings::bounded_weights::WEIGHTS_MAX;
pub use replication::ServiceReplication;
pub use service::{
    DRAIN_MS_MAX, GroupService, SERVICE_ADDRESSES_MAX, SERVICE_NAME_BYTES_MAX, ServiceName,
    ServiceNameError, ServicePolicy, ServiceProtocol, SlotChoice, WEIGHT_DEFAULT, WEIGHT_MAX,
};

use crate::frame::bounded_list_of;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Number of changes that the settings remember, so that a repeated request is not carried out twice.
pub const RECENT_CHANGES_MAX: usize = 128;
/// First byte of encoded settings without replicated services.
const SETTINGS_VERSION: u8 = 1;
/// First byte of encoded settings after which the replicated services follow. Settings without any keep the older form, which
/// releases without replication can read.
const SETTINGS_VERSION_REPLICATED: u8 = 2;

/// The settings of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSettings {
    /// In the order of names.
    #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
    services: Vec<GroupService>,
    /// The last changes, newest last.
    #[serde(deserialize_with = "bounded_list_of::<_, _, RECENT_CHANGES_MAX>")]
    recent_changes: Vec<GroupChangeId>,
    /// Replicated services in the order of their names.
    #[serde(skip)]
    replications: Vec<ServiceReplication>,
}

/// Replicated services as bytes that follow the other settings.
#[derive(Deserialize)]
struct EncodedReplications(
    #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
    Vec<ServiceReplication>,
);

/// The bytes are not settings that this release can use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupSettingsError {
    /// Another release wrote the settings.
    #[error(
        "the group's settings have version {0}, and this release reads version {SETTINGS_VERSION_REPLICATED}; run the same release on all nodes"
    )]
    Version(u8),
    /// The bytes are damaged.
    #[error("the group's settings cannot be read ({0}); run the same release on all nodes")]
    Malformed(String),
    /// The settings contradict themselves.
    #[error("the group's settings are impossible: {0}")]
    Impossible(GroupChangeRefusal),
}

impl GroupSettings {
    /// Returns the services in the order of their names.
    pub fn services(&self) -> &[GroupService] {
        &self.services
    }

    /// Returns the service of this name.
    pub fn service(&self, name: &ServiceName) -> Option<&GroupService> {
        self.services.iter().find(|service| service.name == *name)
    }

    /// Returns the replication of the service of this name, if it is replicated.
    pub fn replication(&self, name: &ServiceName) -> Option<&ServiceReplication> {
        let mut replications = self.replications.iter();
        replications.find(|replication| replication.service == *name)
    }

    /// Returns true if this change is one of the last [`RECENT_CHANGES_MAX`] changes.
    pub fn has_change(&self, id: GroupChangeId) -> bool {
        self.recent_changes.contains(&id)
    }

    /// Returns the bytes for [`crate::membership_frames::GroupData`].
    ///
    /// # Errors
    /// The settings cannot be encoded, which would be a defect of this crate.
    pub fn encode(&self) -> Result<Bytes, GroupSettingsError> {
        let version = match self.replications.is_empty() {
            true => SETTINGS_VERSION,
            false => SETTINGS_VERSION_REPLICATED,
        };
        let encoded = postcard::to_extend(self, vec![version]);
        let encoded = encoded.and_then(|bytes| match self.replications.is_empty() {
            true => Ok(bytes),
            false => postcard::to_extend(&self.replications, bytes),
        });
        encoded
            .map(Bytes::from)
            .map_err(|error| GroupSettingsError::Malformed(error.to_string()))
    }

    /// Reads the bytes that `encode` returned; no bytes are the settings of a new group.
    ///
    /// # Errors
    /// The bytes are no settings, or settings that break a rule of [`GroupSettings::apply`].
    pub fn decode(bytes: &[u8]) -> Result<GroupSettings, GroupSettingsError> {
        let malformed = |error: postcard::Error| GroupSettingsError::Malformed(error.to_string());
        let (version, body) = match bytes.split_first() {
            None => return Ok(GroupSettings::default()),
            Some((version @ &(SETTINGS_VERSION | SETTINGS_VERSION_REPLICATED), body)) => {
                (*version, body)
            }
            Some((&version, _)) => return Err(GroupSettingsError::Version(version)),
        };
        let (mut settings, mut rest) =
            postcard::take_from_bytes::<GroupSettings>(body).map_err(malformed)?;
        if version == SETTINGS_VERSION_REPLICATED {
            let replications;
            (EncodedReplications(replications), rest) =
                postcard::take_from_bytes(rest).map_err(malformed)?;
            settings.replications = replications;
        }
        if !rest.is_empty() {
            let cause = "bytes follow the end".to_owned();
            return Err(GroupSettingsError::Malformed(cause));
        }
        settings.check().map_err(GroupSettingsError::Impossible)?;
        Ok(settings)
    }
}
