//! Elements of this host's programs, with the programs' numbers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_api::pool::{
    DeregistrationResult, ElementEvent, ElementService as Wanted, FromPool, RegistrationRequest,
};
use holdfast_proto::pool_element::{
    self, Event, LinkId, PoolElement, PoolElementConfig, ServerHuntConfig, UserSessionEvent,
    UserSessions, UserSessionsConfig,
};
use holdfast_wire::rserpool::{
    ElementId, ErrorCause, PoolHandle, SctpTransport, Transport, TransportUse,
};

use super::element_index::ElementIndex;
use super::endpoints::PoolEndpoints;
use super::policy_conversion;
use super::program_roles::PoolPrograms;
use crate::api_conversion::parse_handle;
use crate::config::pool::{PoolConfig, RegistrarAddress, cookie_keys};
use crate::sctp_addresses::data_transport;

/// Maximum number of users of an element.
const USERS_MAX: usize = 20_000;

/// A pool element that a program on this host registered.
pub(super) struct HostedElement {
    pub(super) handle: PoolHandle,
    pub(super) machine: PoolElement,
    /// Identifier under which [`ElementIndex`] lists the element; the machine may take another one.
    indexed_id: Option<ElementId>,
    /// Transport address for the element's users.
    pub(super) transport: Transport,
    /// Sessions with the element's users, if the daemon accepts them.
    pub(super) service: Option<SessionService>,
}

/// Sessions of an element with its users.
pub(super) struct SessionService {
    pub(super) sessions: UserSessions,
    /// Links of the users.
    users: std::collections::BTreeSet<LinkId>,
}

impl HostedElement {
    /// Creates an element for a registration of a program, and opens its endpoint if the daemon accepts its sessions.
    ///
    /// # Errors
    /// A text for the program's user: the registration is invalid, or the endpoint cannot be opened.
    pub(super) fn new(
        number: u64,
        registration: RegistrationRequest,
        config: &PoolConfig,
        endpoints: &mut PoolEndpoints,
    ) -> Result<HostedElement, String> {
        let handle = parse_handle(&registration.handle).map_err(|error| error.to_string())?;
        let policy = policy_conversion::policy_from_detail(&registration.policy)?;
        let life = registration
            .life_ms
            .map_or(config.life, Duration::from_millis);
        if life < Duration::from_secs(1) {
            return Err("a registration's life must be at least 1000 ms".to_owned());
        }
        let transport = open_transport(number, &registration.service, config, endpoints)?;
        let has_sessions = matches!(registration.service, Wanted::Sessions { .. });
        let service = has_sessions.then(|| SessionService {
            sessions: UserSessions::new(UserSessionsConfig {
                handle: handle.clone(),
                policy,
                keys: cookie_keys(registration.cookie_keys),
            }),
            users: Default::default(),
        });
        let hunt = hunt_config(config);
        let seed = rand::random();
        let mut machine =
            PoolElementConfig::new(handle.clone(), transport.clone(), policy, hunt, seed);
        machine.life = Some(life);
        machine.life_unit = config.life_unit;
        machine.update_interval = config.update_interval;
        Ok(HostedElement {
            handle,
            machine: PoolElement::new(machine),
            indexed_id: None,
            transport,
            service,
        })
    }

    /// Returns the links of the element's users.
    pub(super) fn user_links(&self) -> Vec<LinkId> {
        let service = self.service.iter();
        service
            .flat_map(|service| &service.users)
            .copied()
            .collect()
    }
}

/// All elements, by the numbers of their programs.
#[derive(Default)]
pub(super) struct HostedElements {
    by_number: BTreeMap<u64, HostedElement>,
    index: ElementIndex,
}

impl HostedElements {
    /// Adds the element of the program with this number.
    pub(super) fn insert(&mut self, number: u64, element: HostedElement) {
        self.by_number.insert(number, element);
    }

    /// Returns the element of the program with this number.
    pub(super) fn get(&self, number: u64) -> Option<&HostedElement> {
        self.by_number.get(&number)
    }

    /// Returns the element of the program with this number, for changes.
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut HostedElement> {
        self.by_number.get_mut(&number)
    }

    /// Returns all elements, in the order of their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = &HostedElement> {
        self.by_number.values()
    }

    /// Returns the numbers of all elements.
    pub(super) fn numbers(&self) -> Vec<u64> {
        self.by_number.keys().copied().collect()
    }

    /// Returns the number of elements.
    pub(super) fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Returns the numbers of the elements with this identifier; without an identifier, of all elements of the pool.
    pub(super) fn find(&self, handle: &PoolHandle, id: Option<ElementId>) -> Vec<u64> {
        self.index.find(handle, id)
    }

    /// Calls `action` with an element's machine, if the element exists.
    pub(super) fn with_machine(&mut self, number: u64, action: impl FnOnce(&mut PoolElement)) {
        if let Some(element) = self.by_number.get_mut(&number) {
            action(&mut element.machine);
        }
    }

    /// Lists an element under its current identifier.
    pub(super) fn update_index(&mut self, number: u64) {
        let Some(element) = self.by_number.get_mut(&number) else {
            return;
        };
        let id = element.machine.id();
        if element.indexed_id == Some(id) {
            return;
        }
        let before = element.indexed_id.replace(id);
        if let Some(before) = before {
            self.index.remove(number, (element.handle.clone(), before));
        }
        self.index.insert(number, (element.handle.clone(), id));
    }

    /// Handles an event of an element's machine. Returns false if the element has ended, and is removed.
    pub(super) fn on_event(
        &mut self,
        number: u64,
        event: Event,
        programs: &mut PoolPrograms,
    ) -> bool {
        let Some(element) = self.by_number.get(&number) else {
            return true;
        };
        let handle = &element.handle;
        let texts =
            |causes: &[ErrorCause]| causes.iter().map(ErrorCause::to_string).collect::<Vec<_>>();
        let report = match event {
            Event::Registered { id, warnings } => {
                tracing::info!(%handle, %id, "registered");
                ElementEvent::Registered {
                    id: id.to_string(),
                    addresses: crate::api_conversion::transport_entry(&element.transport).1,
                    warnings: texts(&warnings),
                }
            }
            Event::RegistrationRefused(refusal) => {
                tracing::warn!(%handle, %refusal, "a registration was refused");
                let reason = refusal.to_string();
                self.end(number, ElementEvent::Refused { reason }, programs);
                return false;
            }
            Event::Deregistered(departure) => {
                let departure = match departure {
                    pool_element::DeregistrationResult::Confirmed => {
                        DeregistrationResult::Confirmed
                    }
                    pool_element::DeregistrationResult::TimedOut => DeregistrationResult::TimedOut,
                    pool_element::DeregistrationResult::Refused(causes) => {
                        DeregistrationResult::Refused {
                            reason: texts(&causes).join(", "),
                        }
                    }
                };
                tracing::info!(%handle, ?departure, "deregistered");
                self.end(number, ElementEvent::Deregistered(departure), programs);
                return false;
            }
            Event::RegistrationExpired => ElementEvent::Expired,
            Event::NewHome { registrar } => {
                tracing::info!(%handle, ?registrar, "found a home registrar");
                let registrar = registrar.map(|id| id.to_string());
                ElementEvent::Home { registrar }
            }
            Event::HomeLost => {
                tracing::warn!(%handle, "lost the home registrar");
                ElementEvent::HomeLost
            }
            Event::NoRegistrar => ElementEvent::NoRegistrar,
            Event::Unanswered { attempts } => {
                tracing::warn!(%handle, attempts, "no answer to registrations");
                return true;
            }
            Event::ErrorReported(causes) => {
                tracing::warn!(%handle, ?causes, "a registrar reports errors");
                return true;
            }
        };
        programs.send(number, &FromPool::Element(report));
        true
    }

    fn end(&mut self, number: u64, last: ElementEvent, programs: &mut PoolPrograms) {
        programs.send_and_close(number, &FromPool::Element(last));
        if let Some(element) = self.by_number.remove(&number)
            && let Some(id) = element.indexed_id
        {
            self.index.remove(number, (element.handle, id));
        }
    }

    /// Handles a new association of a user, from these addresses, with an element. Returns false if the element has too
    /// many users.
    pub(super) fn on_user_connected(
        &mut self,
        number: u64,
        link: LinkId,
        from: Vec<SocketAddr>,
        programs: &mut PoolPrograms,
    ) -> bool {
        let Some(service) = self.service_mut(number) else {
            return true;
        };
        if service.users.len() >= USERS_MAX {
            tracing::warn!(element = number, "refused a user: the element has too many");
            return false;
        }
        service.users.insert(link);
        service.sessions.handle_connected(link);
        let session = session_number(link);
        let event = ElementEvent::Connected { session, from };
        programs.send(number, &FromPool::Element(event));
        true
    }

    /// Returns the service of an element.
    pub(super) fn service_mut(&mut self, number: u64) -> Option<&mut SessionService> {
        self.by_number.get_mut(&number)?.service.as_mut()
    }

    /// Handles the end of a user's association.
    pub(super) fn on_user_lost(&mut self, number: u64, link: LinkId, programs: &mut PoolPrograms) {
        let Some(service) = self.service_mut(number) else {
            return;
        };
        service.sessions.handle_lost(link);
        if service.users.remove(&link) {
            let session = session_number(link);
            let event = ElementEvent::Closed { session };
            programs.send(number, &FromPool::Element(event));
        }
    }
}

impl SessionService {
    /// Returns the number of users.
    pub(super) fn user_count(&self) -> usize {
        self.users.len()
    }
}

/// Returns the transport address of a service for its users. If the daemon accepts the service's sessions, opens the
/// endpoint for them.
fn open_transport(
    number: u64,
    service: &Wanted,
    config: &PoolConfig,
    endpoints: &mut PoolEndpoints,
) -> Result<Transport, String> {
    let usage = TransportUse::DataOnly;
    let transport = match service {
        Wanted::Tcp(at) => Transport::Tcp {
            port: at.port(),
            usage,
            address: endpoints.user_address(config, at.ip())?,
        },
        Wanted::Udp(at) => Transport::Udp {
            port: at.port(),
            address: endpoints.user_address(config, at.ip())?,
        },
        Wanted::Sctp(at) => {
            let port = at.first().ok_or("an SCTP service needs an address")?.port();
            if at.iter().any(|at| at.port() != port) {
                return Err("all addresses of an SCTP service must have the same port".to_owned());
            }
            let addresses = at.iter().map(|at| endpoints.user_address(config, at.ip()));
            Transport::Sctp(SctpTransport {
                port,
                usage,
                addresses: addresses.collect::<Result<_, _>>()?,
            })
        }
        Wanted::Sessions { addresses, port } => {
            let addresses = endpoints.open_service(number, config, addresses, *port)?;
            let port = addresses.first().map_or(0, SocketAddr::port);
            return Ok(Transport::Sctp(SctpTransport {
                port,
                usage: TransportUse::DataAndControl,
                addresses: addresses.iter().map(SocketAddr::ip).collect(),
            }));
        }
    };
    let (_, addresses) = crate::api_conversion::transport_entry(&transport);
    if addresses.iter().any(|at| at.port() == 0) {
        return Err("a service needs a port other than 0".to_owned());
    }
    Ok(transport)
}

/// Handles an event of the control channel of an element's user.
pub(super) fn on_session_event(number: u64, event: UserSessionEvent, programs: &mut PoolPrograms) {
    match event {
        UserSessionEvent::Resumed { link, state } => {
            let event = ElementEvent::Resumed {
                session: session_number(link),
                state: state.to_vec(),
            };
            programs.send(number, &FromPool::Element(event));
        }
        UserSessionEvent::CookieRejected { link, error } => {
            tracing::warn!(session = session_number(link), %error, "rejected a user's cookie");
        }
        UserSessionEvent::UnexpectedCookie { link } => {
            tracing::debug!(
                session = session_number(link),
                "ignored an unexpected cookie"
            );
        }
        UserSessionEvent::BusinessCard { .. } => {}
    }
}

/// Returns a machine's configuration for finding registrars.
pub(super) fn hunt_config(config: &PoolConfig) -> ServerHuntConfig {
    let registrars = config.known_registrars();
    let transport = |at: &RegistrarAddress| match at.transport {
        None => Transport::Sctp(data_transport(&[at.address])),
        // The daemon decides whether to use TLS.
        Some(_) => Transport::Tcp {
            port: at.address.port(),
            usage: TransportUse::DataOnly,
            address: at.address.ip(),
        },
    };
    let mut hunt = ServerHuntConfig::new(registrars.iter().map(transport).collect());
    hunt.trust_announces = config.announces.trusted;
    hunt
}

/// Returns the number of a user's session for the element's program.
pub(super) fn session_number(link: LinkId) -> u64 {
    match link {
        LinkId::Initiated(number) | LinkId::Accepted(number) => number,
    }
}
