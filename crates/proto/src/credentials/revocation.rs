//! Distribution of revocation lists.

use core::time::Duration;
use std::collections::BTreeMap;

use bytes::Bytes;
use holdfast_wire::NodeId;
use holdfast_wire::credential_frames::{
    AUTHORITIES_MAX, AuthorityId, CredentialFrame, REVOCATION_LIST_BYTES_MAX, RevocationNumber,
};

use super::{Command, Credentials, Event, RevocationList};

/// Lists in force, and the requests for newer ones.
#[derive(Debug, Default)]
pub(super) struct Revocations {
    lists: BTreeMap<AuthorityId, (u64, Bytes)>,
    /// Requests by authority; at most [`AUTHORITIES_MAX`].
    requests: BTreeMap<AuthorityId, ListRequest>,
}

/// A request for a newer list.
#[derive(Debug)]
struct ListRequest {
    asked: NodeId,
    /// Time to ask another peer.
    timeout: Duration,
    /// True while the daemon checks the list.
    is_checking: bool,
}

impl Revocations {
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        let waiting = self
            .requests
            .values()
            .filter(|request| !request.is_checking);
        waiting.map(|request| request.timeout).min()
    }

    pub(super) fn number(&self, authority: &AuthorityId) -> u64 {
        self.lists.get(authority).map_or(0, |(number, _)| *number)
    }
}

impl Credentials {
    /// Sets all lists that are in force at this node: at the start, and after each change. `source` is the peer whose list
    /// the daemon has put in force, if the change is the answer to [`Command::ApplyList`].
    pub fn handle_lists(
        &mut self,
        now: Duration,
        source: Option<NodeId>,
        lists: Vec<RevocationList>,
    ) {
        let lists: BTreeMap<_, _> = lists
            .into_iter()
            .take(AUTHORITIES_MAX)
            .map(|list| (list.number.authority, (list.number.number, list.bytes)))
            .collect();
        let is_changed = lists != self.revocations.lists;
        self.revocations.lists = lists;
        if let Some(source) = source {
            self.end_check(now, source);
        }
        if is_changed {
            let peers: Vec<_> = self.peers.keys().copied().collect();
            for peer in peers {
                self.send_numbers(peer);
            }
        }
    }

    /// Handles the refusal of a list from `from`.
    pub fn handle_list_refused(&mut self, now: Duration, from: NodeId, error: String) {
        self.report(Event::ListRefused { from, error });
        self.end_check(now, from);
    }

    /// Ends the request whose list was checked. The peer is asked again only after it has announced its numbers again, since
    /// it may have sent another list than the announced one.
    fn end_check(&mut self, now: Duration, source: NodeId) {
        let requests = self.revocations.requests.iter();
        let checked: Vec<_> = requests
            .filter(|(_, request)| request.asked == source && request.is_checking)
            .map(|(authority, _)| *authority)
            .collect();
        for authority in checked {
            if let Some(numbers) = self.peers.get_mut(&source) {
                numbers.remove(&authority);
            }
            self.revocations.requests.remove(&authority);
            self.request_list(now, authority);
        }
    }

    /// Tells a peer the numbers of all lists, if there are lists.
    pub(super) fn send_numbers(&mut self, to: NodeId) {
        let numbers: Vec<RevocationNumber> = self
            .revocations
            .lists
            .iter()
            .map(|(authority, (number, _))| RevocationNumber {
                authority: *authority,
                number: *number,
            })
            .collect();
        if !numbers.is_empty() {
            self.send(to, CredentialFrame::RevocationNumbers { numbers });
        }
    }

    pub(super) fn on_numbers(&mut self, now: Duration, from: NodeId, numbers: &[RevocationNumber]) {
        let numbers = numbers.iter().take(AUTHORITIES_MAX);
        let numbers: BTreeMap<_, _> = numbers
            .map(|entry| (entry.authority, entry.number))
            .collect();
        let authorities: Vec<_> = numbers.keys().copied().collect();
        self.peers.insert(from, numbers);
        for authority in authorities {
            // Lists of authorities that this node does not trust would be refused.
            if self.config.authorities.contains(&authority) {
                self.request_list(now, authority);
            }
        }
    }

    pub(super) fn on_list_request(&mut self, from: NodeId, authority: AuthorityId) {
        if let Some((_, list)) = self.revocations.lists.get(&authority) {
            let list = list.clone();
            self.send(from, CredentialFrame::RevocationList { list });
        }
    }

    /// Takes a list only from a peer that was asked, so that nobody can make this node check lists all the time.
    pub(super) fn on_list(&mut self, from: NodeId, list: Bytes) {
        let mut requests = self.revocations.requests.values_mut();
        let Some(request) = requests.find(|request| request.asked == from && !request.is_checking)
        else {
            return;
        };
        if list.len() <= REVOCATION_LIST_BYTES_MAX {
            request.is_checking = true;
            self.execute(Command::ApplyList { from, list });
        }
    }

    pub(super) fn on_list_timeout(&mut self, now: Duration) {
        let is_due = |request: &&ListRequest| !request.is_checking && request.timeout <= now;
        let due = self.revocations.requests.iter();
        let due: Vec<_> = due
            .filter(|(_, request)| is_due(request))
            .map(|(authority, request)| (*authority, request.asked))
            .collect();
        for (authority, asked) in due {
            // The peer may announce its numbers again.
            if let Some(numbers) = self.peers.get_mut(&asked) {
                numbers.remove(&authority);
            }
            self.revocations.requests.remove(&authority);
            self.request_list(now, authority);
        }
    }

    pub(super) fn on_list_source_lost(&mut self, now: Duration, peer: NodeId) {
        let requests = self.revocations.requests.iter();
        let lost: Vec<_> = requests
            .filter(|(_, request)| request.asked == peer)
            .map(|(authority, _)| *authority)
            .collect();
        for authority in lost {
            self.revocations.requests.remove(&authority);
            self.request_list(now, authority);
        }
    }

    /// Asks the peer with the newest list, if it is newer than this node's and no request is open.
    fn request_list(&mut self, now: Duration, authority: AuthorityId) {
        if self.revocations.requests.contains_key(&authority) {
            return;
        }
        let own = self.revocations.number(&authority);
        let offers = self.peers.iter().filter_map(|(peer, numbers)| {
            let number = numbers.get(&authority)?;
            (*number > own).then_some((*number, *peer))
        });
        let Some((_, asked)) = offers.max() else {
            return;
        };
        let request = ListRequest {
            asked,
            timeout: now + self.config.list_timeout,
            is_checking: false,
        };
        self.revocations.requests.insert(authority, request);
        self.send(asked, CredentialFrame::RevocationListRequest { authority });
    }
}
