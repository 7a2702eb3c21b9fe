//! Elements of this host's programs, with the programs' numbers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{
    DeregistrationResult, ElementEvent, ElementService as Wanted, FromPool, RegistrationRequest,
};
use holdfast_proto::pool_element::{
    self, Event, LinkId, PoolElement, PoolElementConfig, ServerHuntConfig, UserSessionEvent,
    UserSessions, UserSessionsConfig,
};
use holdfast_sctp::{TransportConfig as EndpointConfig, TransportEndpoint};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{
    ElementId, ErrorCause, Policy, PoolHandle, SctpTransport, Transport, TransportUse,
};

use super::event_loop::PoolEventLoop;
use super::links::{AssociationKey, LinkOwner};
use super::policy_conversion;
use crate::api_conversion::parse_handle;
use crate::config::pool::{PoolConfig, RegistrarAddress, cookie_keys};
use crate::sctp_addresses::{data_transport, reachable_addresses, source_towards};

/// Maximum number of users of an element.
const USERS_MAX: usize = 20_000;

/// An element.
pub(super) struct HostedElement {
    pub(super) handle: PoolHandle,
    pub(super) machine: PoolElement,
    /// Identifier under which [`ElementIndex`](super::element_index::ElementIndex) lists the element; the machine may
    /// take another one.
    pub(super) indexed_id: Option<ElementId>,
    /// Transport address for its users.
    pub(super) transport: Transport,
    /// Sessions with its users, if the daemon accepts them.
    pub(super) service: Option<SessionService>,
}

/// Sessions of an element with its users.
pub(super) struct SessionService {
    pub(super) endpoint: Box<dyn TransportEndpoint>,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) sessions: UserSessions,
    /// Links of the users.
    pub(super) users: std::collections::BTreeSet<LinkId>,
}

impl PoolEventLoop {
    /// Registers a program as an element.
    pub(super) fn register(
        &mut self,
        number: u64,
        registration: RegistrationRequest,
    ) -> Result<(), String> {
        let handle = parse_handle(&registration.handle).map_err(|error| error.to_string())?;
        let policy = policy_conversion::policy_from_detail(&registration.policy)?;
        let life = registration
            .life_ms
            .map_or(self.config.life, Duration::from_millis);
        if life < Duration::from_secs(1) {
            return Err("a registration's life must be at least 1000 ms".to_owned());
        }
        let (transport, service) = self.open_service(&registration, &handle, policy)?;
        let hunt = hunt_config(&self.config);
        let seed = rand::random();
        let mut config =
            PoolElementConfig::new(handle.clone(), transport.clone(), policy, hunt, seed);
        config.life = Some(life);
        config.life_unit = self.config.life_unit;
        config.update_interval = self.config.update_interval;
        let element = HostedElement {
            handle,
            machine: PoolElement::new(config),
            indexed_id: None,
            transport,
            service,
        };
        let service = element.service.iter();
        self.services
            .extend(service.flat_map(|service| &service.addresses));
        self.elements.insert(number, element);
        let now = self.now();
        self.with_element(number, |machine| machine.handle_register(now));
        self.execute_outputs(LinkOwner::Element(number));
        Ok(())
    }

    fn open_service(
        &self,
        registration: &RegistrationRequest,
        handle: &PoolHandle,
        policy: Policy,
    ) -> Result<(Transport, Option<SessionService>), String> {
        let usage = TransportUse::DataOnly;
        let transport = match &registration.service {
            Wanted::Tcp(at) => Transport::Tcp {
                port: at.port(),
                usage,
                address: self.user_address(at.ip())?,
            },
            Wanted::Udp(at) => Transport::Udp {
                port: at.port(),
                address: self.user_address(at.ip())?,
            },
            Wanted::Sctp(at) => {
                let port = at.first().ok_or("an SCTP service needs an address")?.port();
                if at.iter().any(|at| at.port() != port) {
                    return Err(
                        "all addresses of an SCTP service must have the same port".to_owned()
                    );
                }
                let addresses = at.iter().map(|at| self.user_address(at.ip()));
                Transport::Sctp(SctpTransport {
                    port,
                    usage,
                    addresses: addresses.collect::<Result<_, _>>()?,
                })
            }
            Wanted::Sessions { addresses, port } => {
                let service = self.service(addresses, *port, registration, handle, policy)?;
                let port = service.addresses.first().map_or(0, SocketAddr::port);
                let at = Transport::Sctp(SctpTransport {
                    port,
                    usage: TransportUse::DataAndControl,
                    addresses: service.addresses.iter().map(SocketAddr::ip).collect(),
                });
                return Ok((at, Some(service)));
            }
        };
        let (_, addresses) = crate::api_conversion::transport_entry(&transport);
        if addresses.iter().any(|at| at.port() == 0) {
            return Err("a service needs a port other than 0".to_owned());
        }
        Ok((transport, None))
    }

    /// Returns the address for users; replaces an unspecified one.
    fn user_address(&self, address: IpAddr) -> Result<IpAddr, String> {
        if !address.is_unspecified() {
            return Ok(address);
        }
        self.own_address()
    }

    /// Returns this host's address that registrars see.
    fn own_address(&self) -> Result<IpAddr, String> {
        let own_addresses = self
            .config
            .listen
            .first()
            .filter(|own| !own.is_unspecified());
        if let Some(own) = own_addresses {
            return Ok(*own);
        }
        if let Some(first) = self.config.known_registrars().first() {
            return source_towards(first.address)
                .map_err(|error| format!("no route to registrar {first}: {error}"));
        }
        let own_addresses = reachable_addresses(self.own_endpoint.as_ref());
        let own_addresses =
            own_addresses.map_err(|error| format!("{error}; name the service's address"))?;
        own_addresses
            .first()
            .map(SocketAddr::ip)
            .ok_or_else(|| "this host has no address; name the service's".to_owned())
    }

    fn service(
        &self,
        addresses: &[IpAddr],
        port: u16,
        registration: &RegistrationRequest,
        handle: &PoolHandle,
        policy: Policy,
    ) -> Result<SessionService, String> {
        let addresses = match addresses {
            [] => vec![self.own_address()?],
            named => named
                .iter()
                .map(|address| self.user_address(*address))
                .collect::<Result<_, _>>()?,
        };
        let local = addresses.iter().map(|ip| SocketAddr::new(*ip, port));
        let config = EndpointConfig {
            raw: self.config.raw,
            encapsulation: self.own_endpoint.encapsulation_port(),
            failure: self.config.failure,
            path_mtu: self.config.path_mtu,
            ..EndpointConfig::new(local.collect())
        };
        let open = || {
            let endpoint = holdfast_sctp::open(&config)?;
            let addresses = endpoint.local_addresses()?;
            std::io::Result::Ok((endpoint, addresses))
        };
        let (endpoint, addresses) =
            open().map_err(|error| format!("SCTP at {:?}: {error}", config.local))?;
        let sessions = UserSessions::new(UserSessionsConfig {
            handle: handle.clone(),
            policy,
            keys: cookie_keys(registration.cookie_keys.clone()),
        });
        Ok(SessionService {
            endpoint,
            addresses,
            sessions,
            users: Default::default(),
        })
    }

    /// Updates an element's policy information.
    pub(super) fn set_policy(&mut self, number: u64, detail: &PolicyDetail) -> Result<(), String> {
        let policy = policy_conversion::policy_from_detail(detail)?;
        let now = self.now();
        let Some(element) = self.elements.get_mut(&number) else {
            return Ok(());
        };
        let updated = element.machine.handle_policy(now, policy);
        self.execute_outputs(LinkOwner::Element(number));
        updated.map_err(|error| error.to_string())
    }

    /// Takes an element out of its pool; its users' sessions end at once.
    pub(super) fn deregister(&mut self, number: u64) {
        let now = self.now();
        let Some(element) = self.elements.get_mut(&number) else {
            return;
        };
        element.machine.handle_deregister(now);
        let links = element
            .service
            .as_ref()
            .map(|service| service.users.clone());
        for link in links.into_iter().flatten() {
            self.end_user(number, link);
        }
        self.execute_outputs(LinkOwner::Element(number));
    }

    /// Calls `action` with an element's machine, if the element exists.
    pub(super) fn with_element(&mut self, number: u64, action: impl FnOnce(&mut PoolElement)) {
        if let Some(element) = self.elements.get_mut(&number) {
            action(&mut element.machine);
        }
    }

    /// Handles an event of an element's machine.
    pub(super) fn on_element_event(&mut self, number: u64, event: Event) {
        let Some(element) = self.elements.get(&number) else {
            return;
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
                return self.on_element_ended(number, ElementEvent::Refused { reason });
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
                return self.on_element_ended(number, ElementEvent::Deregistered(departure));
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
                return tracing::warn!(%handle, attempts, "no answer to registrations");
            }
            Event::ErrorReported(causes) => {
                return tracing::warn!(%handle, ?causes, "a registrar reports errors");
            }
        };
        self.programs.send(number, &FromPool::Element(report));
    }

    fn on_element_ended(&mut self, number: u64, last: ElementEvent) {
        self.programs
            .send_and_close(number, &FromPool::Element(last));
        // The element's endpoint is dropped too, and reports no more events of its associations.
        if let Some(element) = self.elements.remove(&number) {
            self.unindex_element(number, &element);
            let addresses = element
                .service
                .iter()
                .flat_map(|service| &service.addresses);
            for address in addresses {
                self.services.remove(address);
            }
        }
        for assoc_key in self.links.of_endpoint(number) {
            self.stalled.remove(&assoc_key);
            self.links.remove(assoc_key);
        }
    }

    /// Handles a new association of a user with an element.
    pub(super) fn on_user_association(&mut self, assoc_key: AssociationKey, from: Vec<SocketAddr>) {
        let number = assoc_key.endpoint;
        let owner = LinkOwner::Service(number);
        let Some(link) = self.links.link_for(owner, assoc_key) else {
            return;
        };
        let Some(service) = self.service_of(number) else {
            return;
        };
        if service.users.len() >= USERS_MAX {
            tracing::warn!(element = number, "refused a user: the element has too many");
            return self.abort(assoc_key);
        }
        service.users.insert(link);
        service.sessions.handle_connected(link);
        let session = session_number(link);
        let event = ElementEvent::Connected { session, from };
        self.programs.send(number, &FromPool::Element(event));
        self.execute_outputs(owner);
    }

    /// Returns the service of an element.
    pub(super) fn service_of(&mut self, number: u64) -> Option<&mut SessionService> {
        self.elements.get_mut(&number)?.service.as_mut()
    }

    /// Handles a message on a user's control channel.
    pub(super) fn on_session_message(&mut self, number: u64, link: LinkId, message: Message) {
        if let Some(service) = self.service_of(number) {
            service.sessions.handle_message(link, message);
        }
    }

    /// Handles the end of a user's association.
    pub(super) fn on_session_lost(&mut self, number: u64, link: LinkId) {
        let Some(service) = self.service_of(number) else {
            return;
        };
        service.sessions.handle_lost(link);
        if service.users.remove(&link) {
            let session = session_number(link);
            let event = ElementEvent::Closed { session };
            self.programs.send(number, &FromPool::Element(event));
        }
    }

    /// Handles an event of a control channel.
    pub(super) fn on_service_event(&mut self, number: u64, event: UserSessionEvent) {
        match event {
            UserSessionEvent::Resumed { link, state } => {
                let event = ElementEvent::Resumed {
                    session: session_number(link),
                    state: state.to_vec(),
                };
                self.programs.send(number, &FromPool::Element(event));
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
