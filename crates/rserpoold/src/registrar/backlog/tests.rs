use super::super::associations::association_id;
use super::*;
use bytes::Bytes;
use holdfast_proto::registrar::PoolProtocol;

const DELAY: Duration = Duration::from_millis(10);
const MS: Duration = Duration::from_millis(1);

/// Associations with room for a number of messages, and the messages that they took.
#[derive(Default)]
struct FakeNetwork {
    room_of: BTreeMap<AssocId, usize>,
    received: BTreeMap<AssocId, Vec<Bytes>>,
    calls: usize,
}

impl FakeNetwork {
    fn with_room(room: &[usize]) -> FakeNetwork {
        let room = (1..).map(AssocId).zip(room.iter().copied()).collect();
        FakeNetwork {
            room_of: room,
            ..FakeNetwork::default()
        }
    }

    fn send(&mut self, assocs: &[AssocId], messages: &[MessageToSend], taken: &mut Vec<usize>) {
        self.calls += 1;
        for assoc in assocs {
            let room = self.room_of.get_mut(assoc).expect("an association");
            let count = messages.len().min(*room);
            *room -= count;
            let data = messages.iter().take(count).map(|each| each.data.clone());
            self.received.entry(*assoc).or_default().extend(data);
            taken.push(count);
        }
    }

    fn receive(&mut self, backlog: &mut Backlog, now: Duration) {
        backlog.send_due(now, &mut |assocs, messages, taken| {
            self.send(assocs, messages, taken);
        });
    }

    /// Returns the numbers of the messages that an association took.
    fn numbers(&self, assoc: u64) -> Vec<u32> {
        let received = self.received.get(&AssocId(assoc)).into_iter().flatten();
        let number = |data: &Bytes| u32::from_be_bytes(data[..4].try_into().expect("four bytes"));
        received.map(number).collect()
    }
}

fn association_ids(count: u64) -> Arc<[AssociationId]> {
    let assocs = (1..=count).map(AssocId);
    assocs
        .map(|assoc| association_id(PoolProtocol::Enrp, assoc))
        .collect()
}

fn message(id: u32, len: usize) -> MessageToSend {
    let mut data = id.to_be_bytes().to_vec();
    data.resize(len.max(4), 0);
    MessageToSend::new(12, data.into())
}

#[test]
fn successive_updates_are_sent_together() {
    for (one_send, calls) in [(true, 1), (false, 2)] {
        let mut backlog = Backlog::new(DELAY, one_send);
        let mut net = FakeNetwork::with_room(&[100, 100]);
        let to = association_ids(2);
        // Nothing was sent for a long time, so the first message does not wait.
        backlog.push_all(&to, message(0, 100));
        net.receive(&mut backlog, DELAY);
        assert_eq!((net.numbers(1), net.calls), (vec![0], calls));
        for id in 1..5 {
            backlog.push_all(&to, message(id, 100));
            net.receive(&mut backlog, DELAY + MS * id);
        }
        assert_eq!((net.numbers(1), net.calls), (vec![0], calls));
        assert_eq!(backlog.next_send(DELAY), Some(DELAY * 2));
        net.receive(&mut backlog, DELAY * 2);
        assert_eq!((net.numbers(2), net.calls), ((0..5).collect(), 2 * calls));
        assert_eq!(backlog.next_send(DELAY * 2), None);
        // Many messages fill packets anyway, so they do not wait.
        (5..5 + FRESH_MAX as u32).for_each(|id| backlog.push_all(&to, message(id, 4)));
        net.receive(&mut backlog, DELAY * 2);
        assert_eq!(net.numbers(1).len(), 5 + FRESH_MAX);
    }
}

#[test]
fn message_without_room_is_queued_in_order() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = FakeNetwork::with_room(&[100, 3]);
    let to = association_ids(2);
    for id in 0..10 {
        backlog.push_all(&to, message(id, 100));
    }
    net.receive(&mut backlog, DELAY);
    // A message for one of them alone, and one for all.
    backlog.push(AssocId(2), message(10, 100));
    backlog.push_all(&to, message(11, 100));
    net.receive(&mut backlog, DELAY * 3);
    assert_eq!(net.numbers(1), (0..10).chain([11]).collect::<Vec<_>>());
    assert_eq!(net.numbers(2), [0, 1, 2]);
    let now = DELAY * 4;
    assert_eq!(backlog.next_send(now), Some(now + RETRY_INTERVAL));
    net.room_of.insert(AssocId(2), 4);
    net.receive(&mut backlog, now);
    net.room_of.insert(AssocId(2), 100);
    net.receive(&mut backlog, now);
    assert_eq!(net.numbers(2), (0..12).collect::<Vec<_>>());
    assert_eq!(backlog.next_send(now), None);
}

#[test]
fn message_for_one_peer_follows_earlier_messages_for_all() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = FakeNetwork::with_room(&[100, 100]);
    net.receive(&mut backlog, DELAY);
    let to = association_ids(2);
    (0..3).for_each(|id| backlog.push_all(&to, message(id, 4)));
    backlog.push(AssocId(2), message(3, 4));
    backlog.push_all(&to, message(4, 4));
    // Too early for the last message, which only `send_all` sends.
    net.receive(&mut backlog, Duration::ZERO);
    backlog.send_all(&mut |assocs, messages, taken| net.send(assocs, messages, taken));
    assert_eq!(net.numbers(1), [0, 1, 2, 4]);
    assert_eq!(net.numbers(2), [0, 1, 2, 3, 4]);
}

#[test]
fn stuck_peer_delays_requests_and_is_given_up() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = FakeNetwork::with_room(&[10_000, 0]);
    let to = association_ids(2);
    let mut fill = |backlog: &mut Backlog, at: Duration, bytes: usize| {
        (0..bytes / 1024).for_each(|id| backlog.push_all(&to, message(id as u32, 1024)));
        net.receive(backlog, at);
    };
    fill(&mut backlog, DELAY, LONG_BYTES);
    assert!(!backlog.is_long() && backlog.pop_stuck_peer(DELAY).is_none());
    fill(&mut backlog, DELAY * 2, 1024 * FRESH_MAX);
    assert!(backlog.is_long());
    fill(&mut backlog, DELAY * 2 + LONG_TIMEOUT - MS, 1024);
    assert_eq!(backlog.pop_stuck_peer(DELAY * 2 + LONG_TIMEOUT - MS), None);
    let after_timeout = DELAY * 2 + LONG_TIMEOUT;
    assert_eq!(backlog.pop_stuck_peer(after_timeout), Some(AssocId(2)));
    assert!(!backlog.is_long() && backlog.pop_stuck_peer(after_timeout).is_none());
    // Data that the peer itself requests may exceed the limit within less time.
    fill(&mut backlog, after_timeout + DELAY, BYTES_MAX + 1024);
    assert_eq!(
        backlog.pop_stuck_peer(after_timeout + DELAY),
        Some(AssocId(2))
    );
}

#[test]
fn reused_association_number_gets_no_old_messages() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = FakeNetwork::with_room(&[100, 0]);
    let to = association_ids(2);
    net.receive(&mut backlog, DELAY);
    backlog.push_all(&to, message(0, 4));
    net.receive(&mut backlog, DELAY);
    backlog.push_all(&to, message(1, 4));
    backlog.forget(AssocId(2));
    net.room_of.insert(AssocId(2), 100);
    net.receive(&mut backlog, DELAY * 2);
    assert_eq!((net.numbers(1), net.numbers(2)), (vec![0, 1], vec![]));
}
