//! Model of a pool element: it seeks a registrar, re-registers regularly, answers keep-alives, and follows the H flag.

use holdfast_sim::associations::{AssociationNumber, NodeNumber};
use holdfast_sim::pools::node_numbers;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, Policy, PoolElement, PoolHandle, RegistrarId};
use std::time::Duration;

/// Time between registrations.
pub const REREGISTRATION_INTERVAL: Duration = Duration::from_millis(3_500);
/// Longest time for a registrar to answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(800);
/// Life of a registration in milliseconds.
const LIFE: i32 = 9_000;

pub struct Element {
    pub node: NodeNumber,
    pub handle: PoolHandle,
    pub id: ElementId,
    pub alive: bool,
    /// The association with its home registrar.
    pub home: Option<AssociationNumber>,
    /// Time of the open request, if any.
    pub request_time: Option<Duration>,
    /// Time of the next registration or hunt.
    pub next_action: Duration,
    pub load: u32,
    /// True if the last registration was granted.
    pub is_registered: bool,
}

impl Element {
    /// Returns the element with this index, whose node is `node`.
    pub fn new(node: NodeNumber, index: usize) -> Element {
        Element {
            node,
            handle: PoolHandle::from(["one", "other", "third"][index % 3]),
            id: ElementId(0x100 + index as u32),
            alive: true,
            home: None,
            request_time: None,
            next_action: Duration::ZERO,
            load: 0,
            is_registered: false,
        }
    }

    pub fn registration(&mut self) -> Message {
        self.load = self.load.wrapping_mul(29).wrapping_add(12_345_678);
        Message::Registration {
            handle: self.handle.clone(),
            element: PoolElement {
                id: self.id,
                home: RegistrarId(0),
                registration_life: LIFE,
                user_transport: node_numbers::service_transport(self.node),
                policy: Policy::LeastUsed { load: self.load },
                asap_transport: None,
            },
        }
    }

    /// Handles a message; returns the answer.
    pub fn handle_message(
        &mut self,
        now: Duration,
        association: AssociationNumber,
        message: Message,
    ) -> Option<Message> {
        match message {
            Message::RegistrationResponse { rejected, .. } if self.home == Some(association) => {
                assert!(!rejected, "a registration was refused");
                self.request_time = None;
                self.is_registered = true;
                None
            }
            Message::EndpointKeepAlive { home, handle, .. } if handle == self.handle => {
                if home && self.home != Some(association) {
                    self.home = Some(association);
                    self.request_time = None;
                    self.next_action = now + REREGISTRATION_INTERVAL;
                }
                Some(Message::EndpointKeepAliveAck {
                    handle: self.handle.clone(),
                    id: self.id,
                })
            }
            _ => None,
        }
    }
}
