//! Changes of the group's settings. Any node takes a request of its operator and forwards it to the contact node, until
//! the contact node answers; the contact node applies the change and answers when a view with the change is committed.
//!
//! A change has an identity, and the settings contain the identities of the last changes. So a request that is repeated,
//! also at another contact node, changes the settings once.

#[cfg(test)]
mod tests;

use super::event::{Event, GroupChangeFailure};
use super::{Membership, OperatorError, Standing};
use holdfast_wire::group_data::{
    GroupChange, GroupChangeId, GroupChangeRefusal, GroupNodes, GroupSettings,
};
use holdfast_wire::membership_frames::{
    GROUP_DATA_BYTES_MAX, GroupData, MembershipFrame, NodeName, ServerListVersion, VotedView,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most changes that wait for a vote at the contact node, and most requests of a node's operator that wait for an answer.
const PENDING_MAX: usize = 64;
/// Most changes of one other node that wait for a vote, and that are judged in one second. The thread that judges them
/// also renews the lease. The node repeats its request later.
const PENDING_OF_NODE_MAX: usize = 16;

/// A request of this node's operator, without an answer so far.
#[derive(Debug)]
struct OwnRequest {
    change: GroupChange,
    uid: Option<u32>,
    retry_at: Duration,
    give_up_at: Duration,
}

/// The requests of this node's operator.
#[derive(Debug, Default)]
pub(super) struct OwnRequests(BTreeMap<GroupChangeId, OwnRequest>);

impl OwnRequests {
    /// Returns the time of the next repetition or of the end of a request.
    pub fn next_timeout(&self) -> Option<Duration> {
        let due = |request: &OwnRequest| request.retry_at.min(request.give_up_at);
        self.0.values().map(due).min()
    }

    /// Makes all requests due: there is another contact node.
    pub fn retry_all(&mut self, now: Duration) {
        for request in self.0.values_mut() {
            request.retry_at = now;
        }
    }
}

/// A change that waits for a vote at the contact node.
#[derive(Debug)]
struct PendingChange {
    id: GroupChangeId,
    change: GroupChange,
    /// The node that gets the answer.
    from: NodeName,
    uid: Option<u32>,
}

/// The changes that wait for a vote at the contact node.
#[derive(Debug, Default)]
pub(super) struct PendingChanges {
    /// In the order in which the changes are applied.
    changes: Vec<PendingChange>,
    /// The settings with all changes; none if they must be computed anew.
    applied: Option<AppliedChanges>,
    /// Number of changes of other nodes that were judged in the second `judged_in`.
    judged: BTreeMap<NodeName, usize>,
    judged_in: u64,
}

/// The settings with all changes that wait.
#[derive(Debug)]
struct AppliedChanges {
    /// Epoch of the view, and version of the list of server nodes, that the changes build on.
    base: (u64, ServerListVersion),
    /// The nodes of the group.
    nodes: GroupNodes,
    settings: GroupSettings,
}

impl PendingChanges {
    /// Returns true if a further change of another node may be judged in this second.
    fn admits(&mut self, now: Duration, from: &NodeName) -> bool {
        if self.judged_in != now.as_secs() {
            self.judged_in = now.as_secs();
            self.judged.clear();
        }
        let waiting = self.changes.iter().filter(|change| change.from == *from);
        let judged = self.judged.entry(from.clone()).or_default();
        *judged += 1;
        *judged <= PENDING_OF_NODE_MAX && waiting.count() < PENDING_OF_NODE_MAX
    }

    /// Applies the changes to the settings in turn. Returns the result, and the changes that are refused.
    fn apply(
        &self,
        settings: &GroupSettings,
        nodes: &GroupNodes,
    ) -> (GroupSettings, Vec<(GroupChangeId, GroupChangeRefusal)>) {
        let apply_with = |apply: ApplyChange| {
            let (mut settings, mut refused) = (settings.clone(), Vec::new());
            for PendingChange { id, change, .. } in &self.changes {
                match apply(&settings, *id, change, nodes) {
                    Ok(next) => settings = next,
                    Err(refusal) => refused.push((*id, refusal)),
                }
            }
            (settings, refused)
        };
        // The length is measured once, and after each change only if one of them must be refused for it.
        let (settings, refused) = apply_with(GroupSettings::apply);
        match is_within_bounds(&settings) {
            true => (settings, refused),
            false => apply_with(apply_within_bounds),
        }
    }
}

/// A function that applies a change to settings.
type ApplyChange = fn(
    &GroupSettings,
    GroupChangeId,
    &GroupChange,
    &GroupNodes,
) -> Result<GroupSettings, GroupChangeRefusal>;

/// Returns true if the settings are short enough for a view.
fn is_within_bounds(settings: &GroupSettings) -> bool {
    let length = settings.encode().map_or(usize::MAX, |bytes| bytes.len());
    length <= GROUP_DATA_BYTES_MAX
}

/// Applies a change, unless the settings would be too long for a view.
fn apply_within_bounds(
    settings: &GroupSettings,
    id: GroupChangeId,
    change: &GroupChange,
    nodes: &GroupNodes,
) -> Result<GroupSettings, GroupChangeRefusal> {
    let next = settings.apply(id, change, nodes)?;
    match is_within_bounds(&next) {
        true => Ok(next),
        false => Err(GroupChangeRefusal::TooLong),
    }
}

impl Membership {
    /// Requests a change of the group's settings, for the user `uid` of this host (none for the daemon itself).
    /// [`Event::GroupChangeEnded`] follows. The caller chooses a random `id`; a caller that repeats a request repeats the
    /// `id`.
    ///
    /// # Errors
    /// The node is outside the group, or too many requests wait.
    pub fn handle_group_change(
        &mut self,
        now: Duration,
        id: GroupChangeId,
        change: GroupChange,
        uid: Option<u32>,
    ) -> Result<(), OperatorError> {
        let requests = &mut self.own_requests.0;
        if self.standing == Standing::Outside {
            return Err(OperatorError::Outside);
        }
        if requests.len() >= PENDING_MAX && !requests.contains_key(&id) {
            return Err(OperatorError::Busy);
        }
        let request = OwnRequest {
            change,
            uid,
            retry_at: now,
            give_up_at: now + self.config.group_change_timeout,
        };
        requests.insert(id, request);
        self.on_group_changes_timeout(now);
        self.settle(now);
        Ok(())
    }

    /// Sends the requests that are due, and gives up those that nobody answered in time.
    pub(super) fn on_group_changes_timeout(&mut self, now: Duration) {
        let requests = &mut self.own_requests.0;
        let ended = requests
            .iter()
            .filter(|(_, request)| request.give_up_at <= now);
        let ended: Vec<GroupChangeId> = ended.map(|(id, _)| *id).collect();
        for id in ended {
            self.own_requests.0.remove(&id);
            let result = Err(GroupChangeFailure::Unanswered);
            self.report(Event::GroupChangeEnded { id, result });
        }
        let interval = self.config.group_change_retry_interval;
        let mut due = Vec::new();
        for (id, request) in &mut self.own_requests.0 {
            if request.retry_at <= now {
                request.retry_at = now + interval;
                due.push((*id, request.change.clone(), request.uid));
            }
        }
        let contact = self.contact_member().map(|contact| contact.name.clone());
        for (id, change, uid) in due {
            if self.standing == Standing::ContactNode {
                let from = self.config.name.clone();
                self.admit_change(now, from, id, change, uid);
            } else if let Some(contact) = contact.clone() {
                let frame = MembershipFrame::GroupChangeRequest { id, change, uid };
                self.send(contact, frame);
            }
        }
    }

    pub(super) fn on_group_change_request(
        &mut self,
        now: Duration,
        from: &NodeName,
        id: GroupChangeId,
        change: GroupChange,
        uid: Option<u32>,
    ) {
        const NAME: &str = "GroupChangeRequest";
        if self.standing != Standing::ContactNode {
            return self.name_contact(from, NAME);
        }
        let voter = self.view.as_ref().and_then(|view| view.voter(from));
        if voter.is_none() && self.server_list.by_name(from).is_none() {
            return self.ignore(from, NAME, "the sender is not a member");
        }
        let is_known = self.settings.as_ref().is_some_and(|it| it.has_change(id))
            || self.contact.changes.changes.iter().any(|it| it.id == id);
        if !is_known && !self.contact.changes.admits(now, from) {
            return self.ignore(from, NAME, "the sender requests too many changes at once");
        }
        self.admit_change(now, from.clone(), id, change, uid);
    }

    /// Lets a change wait for the next vote, unless the change is made already or impossible.
    fn admit_change(
        &mut self,
        now: Duration,
        from: NodeName,
        id: GroupChangeId,
        change: GroupChange,
        uid: Option<u32>,
    ) {
        if let (Some(settings), Some(view)) = (&self.settings, &self.view)
            && settings.has_change(id)
        {
            let version = view.group_data.version;
            return self.answer_change(&from, id, Ok(version));
        }
        if !self.is_serving(now) {
            // The request is repeated, here or at the next contact node.
            return;
        }
        let pending = &mut self.contact.changes.changes;
        if let Some(known) = pending.iter_mut().find(|known| known.id == id) {
            known.from = from;
            return;
        }
        let is_full = pending.len() >= PENDING_MAX;
        let refusal = match self.take_applied_changes() {
            None => Some(GroupChangeRefusal::UnreadableSettings),
            Some(applied) if is_full => {
                self.contact.changes.applied = Some(applied);
                Some(GroupChangeRefusal::Busy)
            }
            Some(mut applied) => {
                let next = apply_within_bounds(&applied.settings, id, &change, &applied.nodes);
                let refusal = match next {
                    Ok(next) => {
                        applied.settings = next;
                        None
                    }
                    Err(refusal) => Some(refusal),
                };
                self.contact.changes.applied = Some(applied);
                refusal
            }
        };
        let change = PendingChange {
            id,
            change,
            from,
            uid,
        };
        match refusal {
            Some(refusal) => self.end_change(change, Err(refusal)),
            None => self.contact.changes.changes.push(change),
        }
    }

    /// Takes the settings with all changes that wait out of `applied`, computed anew if view or server nodes have
    /// changed. Returns none if this release cannot read the settings.
    fn take_applied_changes(&mut self) -> Option<AppliedChanges> {
        let base = (self.view.as_ref()?.epoch, self.server_list.version());
        let applied = self.contact.changes.applied.take();
        if let Some(applied) = applied.filter(|applied| applied.base == base) {
            return Some(applied);
        }
        let nodes = self.group_nodes();
        let settings = self.settings.as_ref()?;
        let (settings, refused) = self.contact.changes.apply(settings, &nodes);
        for (id, refusal) in refused {
            // The nodes of the group have changed since the request was admitted.
            self.end_pending(|change| change.id == id, Err(refusal));
        }
        Some(AppliedChanges {
            base,
            nodes,
            settings,
        })
    }

    /// Returns the group data with the changes that wait; none if there are none.
    pub(super) fn changed_group_data(&mut self, data: &GroupData) -> Option<GroupData> {
        if self.contact.changes.changes.is_empty() {
            return None;
        }
        let applied = self.take_applied_changes()?;
        let bytes = applied.settings.encode().ok()?;
        let is_changed = self.settings.as_ref() != Some(&applied.settings);
        self.contact.changes.applied = Some(applied);
        is_changed.then_some(GroupData {
            version: data.version + 1,
            bytes,
        })
    }

    /// Answers the changes that a committed view has.
    pub(super) fn answer_committed_changes(&mut self, view: &VotedView) {
        let Some(settings) = self.settings.clone() else {
            return;
        };
        let version = view.group_data.version;
        self.end_pending(|change| settings.has_change(change.id), Ok(version));
    }

    fn end_pending(
        &mut self,
        is_ended: impl Fn(&PendingChange) -> bool,
        result: Result<u64, GroupChangeRefusal>,
    ) {
        let pending = &mut self.contact.changes.changes;
        let ended: Vec<PendingChange> = pending.extract_if(.., |it| is_ended(it)).collect();
        for change in ended {
            self.end_change(change, result.clone());
        }
    }

    /// Reports a change that is committed or refused, and answers the node that asked.
    fn end_change(&mut self, change: PendingChange, result: Result<u64, GroupChangeRefusal>) {
        let PendingChange {
            id,
            change,
            from,
            uid,
        } = change;
        self.answer_change(&from, id, result.clone());
        self.report(Event::GroupChangeDecided {
            change: Box::new(change),
            from,
            uid,
            result,
        });
    }

    fn answer_change(
        &mut self,
        to: &NodeName,
        id: GroupChangeId,
        result: Result<u64, GroupChangeRefusal>,
    ) {
        match *to == self.config.name {
            true => self.end_own_request(id, result),
            false => {
                let frame = MembershipFrame::GroupChangeResponse { id, result };
                self.send(to.clone(), frame);
            }
        }
    }

    pub(super) fn on_group_change_response(
        &mut self,
        from: &NodeName,
        id: GroupChangeId,
        result: Result<u64, GroupChangeRefusal>,
    ) {
        const NAME: &str = "GroupChangeResponse";
        let voter = self.view.as_ref().and_then(|view| view.voter(from));
        if voter.is_none() {
            return self.ignore(from, NAME, "the sender is not a voter");
        }
        if !self.own_requests.0.contains_key(&id) {
            return self.ignore(from, NAME, "this node waits for no such answer");
        }
        self.end_own_request(id, result);
    }

    fn end_own_request(&mut self, id: GroupChangeId, result: Result<u64, GroupChangeRefusal>) {
        if self.own_requests.0.remove(&id).is_some() {
            let result = result.map_err(GroupChangeFailure::Refused);
            self.report(Event::GroupChangeEnded { id, result });
        }
    }

    /// Reads the settings of the view that this node obeys, if they are news.
    pub(super) fn update_settings(&mut self, former: Option<&GroupData>) {
        let Some(view) = &self.view else {
            return;
        };
        let data = &view.group_data;
        if former == Some(data) {
            return;
        }
        let version = data.version;
        match GroupSettings::decode(&data.bytes) {
            Ok(settings) => {
                self.settings = Some(settings);
                self.report(Event::SettingsChanged { version });
            }
            Err(error) => {
                self.settings = None;
                self.report(Event::SettingsUnreadable { version, error });
            }
        }
    }

    /// Returns the group's settings; none if another release wrote settings that this one cannot read.
    pub fn settings(&self) -> Option<&GroupSettings> {
        self.settings.as_ref()
    }

    /// Returns names and addresses of all members that this node knows.
    pub fn group_nodes(&self) -> GroupNodes {
        let voters = self.view.as_ref().map_or(&[][..], |view| &view.voters[..]);
        let mut nodes = GroupNodes::default();
        for member in voters.iter().chain(self.server_list.members()) {
            nodes.names.insert(member.name.clone());
            nodes.addresses.insert(member.address.ip());
        }
        nodes
    }
}
