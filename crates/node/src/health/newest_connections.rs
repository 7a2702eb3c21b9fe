//! A sample of a service's newest connections, which shows whether the server reads requests.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_wire::Flow;

/// Most connections in the sample of a service.
const SAMPLE_MAX: usize = 8;

/// The sample. A connection enters while there is room, is inspected at a certain age, and stays as long as the server
/// has read nothing of its request.
#[derive(Debug, Default)]
pub(crate) struct NewestConnections {
    members: BTreeMap<Flow, Member>,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    since: Duration,
    is_inspected: bool,
}

impl NewestConnections {
    /// Adds a new connection, if there is room.
    pub fn add(&mut self, now: Duration, flow: Flow) {
        if self.members.len() < SAMPLE_MAX {
            let member = Member {
                since: now,
                is_inspected: false,
            };
            self.members.insert(flow, member);
        }
    }

    /// Returns the connections of at least this age, to be inspected.
    pub fn due(&mut self, now: Duration, age: Duration) -> Vec<Flow> {
        let due = self
            .members
            .iter_mut()
            .filter(|(_, member)| now >= member.since + age);
        due.map(|(flow, member)| {
            member.is_inspected = true;
            *flow
        })
        .collect()
    }

    /// Takes the result of an inspection. Returns the number of connections with unread requests.
    pub fn on_inspected(&mut self, is_unread: impl Fn(&Flow) -> bool) -> u32 {
        self.members
            .retain(|flow, member| !member.is_inspected || is_unread(flow));
        let unread = self.members.values().filter(|member| member.is_inspected);
        u32::try_from(unread.count()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_wire::Protocol;

    fn flow(port: u16) -> Flow {
        Flow {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, 9], port).into(),
        }
    }

    #[test]
    fn read_connections_make_room_for_others() {
        let (age, mut sample) = (Duration::from_millis(500), NewestConnections::default());
        for port in 1..=20 {
            sample.add(Duration::from_millis(u64::from(port)), flow(port));
        }
        assert_eq!(sample.due(Duration::from_millis(500), age), []);
        let due = sample.due(Duration::from_millis(503), age);
        assert_eq!(due, [flow(1), flow(2), flow(3)]);
        assert_eq!(sample.on_inspected(|flow| flow.remote.port() != 2), 2);
        sample.add(Duration::from_millis(510), flow(30));
        sample.add(Duration::from_millis(510), flow(31));
        let due = sample.due(Duration::from_secs(9), age);
        assert_eq!(due.len(), SAMPLE_MAX);
        assert!(due.contains(&flow(30)) && !due.contains(&flow(31)));
        assert_eq!(sample.on_inspected(|_| false), 0);
        assert_eq!(sample.due(Duration::from_secs(9), age), []);
    }
}
