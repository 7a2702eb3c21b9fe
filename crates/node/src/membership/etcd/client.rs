//! The client of one endpoint: carries out requests of the machine by transactions of etcd.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_daemon::tls::{TlsError, read_certificates};
use holdfast_proto::membership::{StoreAnswer, StoreRequest};
use holdfast_wire::membership_frames::{MembershipState, NodeName, VotedView};
use holdfast_wire::saved_membership::{
    SAVED_MEMBERSHIP_BYTES_MAX, SavedMembership, SavedMembershipError,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::http::{HttpConnection, Response};
use super::messages::{
    AuthenticateResponse, CompareAndSwapResponse, ErrorResponse, KeyValue, RangeResponse,
    authenticate_request, compare_and_swap_request, range_request,
};
use crate::config::{EtcdConfig, EtcdEndpoint};

/// Time for which an endpoint may take for a request.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(600);
/// Maximum length of a response: a value in base64, and the rest.
const RESPONSE_BYTES_MAX: usize = SAVED_MEMBERSHIP_BYTES_MAX / 3 * 4 + (64 << 10);
/// Maximum length of a password.
const PASSWORD_BYTES_MAX: usize = 4_096;
/// Maximum length of an error of etcd in messages.
const ERROR_CHARS_MAX: usize = 200;

/// Reason for which an endpoint of etcd does not answer a request.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The endpoint is out of reach, too slow, or no server of etcd.
    #[error("{0}")]
    Io(#[source] io::Error),
    /// A certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A key or the settings of TLS cannot be used.
    #[error("{}: {problem} (etcd.certificate, etcd.key)", .path.display())]
    Key {
        /// File of the private key, or of the certificate.
        path: PathBuf,
        /// Reason why key or TLS settings cannot be used.
        problem: String,
    },
    /// The password cannot be read.
    #[error("{}: {source} (etcd.password_file)", .path.display())]
    Password {
        /// File of the password.
        path: PathBuf,
        /// Error of the system in reading the password.
        source: io::Error,
    },
    /// The endpoint refused the request.
    #[error("HTTP status {status}: {message}")]
    Refused {
        /// The status of HTTP.
        status: u16,
        /// Explanation of etcd.
        message: String,
    },
    /// The response is not that of etcd.
    #[error("the response is not one of etcd v3: {0}")]
    Response(#[from] serde_json::Error),
    /// The key has another content than a view.
    #[error("key {key} {source}; name another etcd.prefix")]
    Content {
        /// Key under which etcd should have the view.
        key: String,
        /// Reason why the content is not a view.
        source: SavedMembershipError,
    },
    /// The key has no view of this group.
    #[error("key {0} has no view of this group; name another etcd.prefix")]
    OtherGroup(String),
}

/// HTTP client of one etcd endpoint.
pub(super) struct EtcdClient {
    endpoint: EtcdEndpoint,
    tls: Option<Arc<ClientConfig>>,
    credentials: Option<(String, String)>,
    key: String,
    group: String,
    node: NodeName,
    connection: Option<HttpConnection>,
    /// Time for which the endpoint may take for a request.
    pub(super) request_timeout: Duration,
    /// The token of the authenticated user.
    token: Option<String>,
}

impl EtcdClient {
    /// Returns the client of the endpoint at `position` of the list, without a connection.
    ///
    /// # Errors
    /// A certificate, key or password cannot be read.
    pub fn new(
        config: &EtcdConfig,
        position: usize,
        group: &str,
        node: &NodeName,
    ) -> Result<EtcdClient, EtcdError> {
        let endpoint = config.endpoints[position].clone();
        let tls = endpoint.is_tls.then(|| tls_config(config)).transpose()?;
        let credentials = match (&config.user, &config.password_file) {
            (Some(user), Some(path)) => Some((user.clone(), read_password(path)?)),
            _ => None,
        };
        Ok(EtcdClient {
            endpoint,
            tls,
            credentials,
            key: format!("{}{group}/view", config.prefix),
            group: group.to_owned(),
            node: node.clone(),
            connection: None,
            request_timeout: REQUEST_TIMEOUT,
            token: None,
        })
    }

    /// Carries out a request.
    ///
    /// # Errors
    /// The endpoint does not answer in time, refuses, or has something else than a view.
    pub fn carry_out(&mut self, request: &StoreRequest) -> Result<StoreAnswer, EtcdError> {
        let deadline = Instant::now() + self.request_timeout;
        let present = self.read(deadline)?;
        let present_view = present.as_ref().map(|present| self.view_of(present));
        let present_view = present_view.transpose()?;
        let StoreRequest::Propose { expected, view } = request else {
            return Ok(StoreAnswer::View(present_view));
        };
        if present_view.as_ref().map(|view| view.epoch) != *expected {
            return Ok(StoreAnswer::View(present_view));
        }
        let value = self.value_of(view)?;
        let revision = present.map_or(0, |present| present.mod_revision);
        let request = compare_and_swap_request(self.key.as_bytes(), revision, &value);
        let response: CompareAndSwapResponse = self.call("/v3/kv/txn", &request, deadline)?;
        if response.succeeded {
            return Ok(StoreAnswer::Stored);
        }
        let present = response.into_present();
        let view = present.map(|present| self.view_of(&present)).transpose()?;
        Ok(StoreAnswer::View(view))
    }

    fn read(&mut self, deadline: Instant) -> Result<Option<KeyValue>, EtcdError> {
        let request = range_request(self.key.as_bytes());
        let response: RangeResponse = self.call("/v3/kv/range", &request, deadline)?;
        Ok(response.kvs.into_iter().next())
    }

    /// Returns the value that the store has for a view: the form of a saved membership, with its check sum and its group.
    pub(super) fn value_of(&self, view: &VotedView) -> Result<Vec<u8>, EtcdError> {
        let saved = SavedMembership {
            group: self.group.clone(),
            node: self.node.clone(),
            state: MembershipState {
                committed: Some(view.clone()),
                ..MembershipState::default()
            },
        };
        saved.encode().map_err(|source| self.content_error(source))
    }

    fn view_of(&self, present: &KeyValue) -> Result<VotedView, EtcdError> {
        let saved = SavedMembership::decode(&present.value);
        let saved = saved.map_err(|source| self.content_error(source))?;
        let view = saved.state.committed.filter(|_| saved.group == self.group);
        view.ok_or_else(|| EtcdError::OtherGroup(self.key.clone()))
    }

    fn content_error(&self, source: SavedMembershipError) -> EtcdError {
        let key = self.key.clone();
        EtcdError::Content { key, source }
    }

    /// Sends a request of the API, with a token if there is a user. A token that etcd does not know any more is replaced.
    pub(super) fn call<T: DeserializeOwned>(
        &mut self,
        path: &str,
        request: &Value,
        deadline: Instant,
    ) -> Result<T, EtcdError> {
        if self.token.is_none() {
            self.authenticate(deadline)?;
        }
        let mut response = self.post(path, request, deadline)?;
        if self.credentials.is_some() && is_unauthenticated(&response) {
            self.authenticate(deadline)?;
            response = self.post(path, request, deadline)?;
        }
        Ok(serde_json::from_slice(&accepted(response)?)?)
    }

    fn authenticate(&mut self, deadline: Instant) -> Result<(), EtcdError> {
        self.token = None;
        let Some((user, password)) = &self.credentials else {
            return Ok(());
        };
        let request = authenticate_request(user, password);
        let response = self.post("/v3/auth/authenticate", &request, deadline)?;
        let response: AuthenticateResponse = serde_json::from_slice(&accepted(response)?)?;
        let is_plain = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        self.token = Some(response.token).filter(is_plain);
        Ok(())
    }

    /// Sends a request on the open connection, or on a new one. An idle connection may have been closed, so that a failure
    /// of one that was used before is tried again.
    fn post(
        &mut self,
        path: &str,
        request: &Value,
        deadline: Instant,
    ) -> Result<Response, EtcdError> {
        let body = request.to_string();
        let content = (body.as_bytes(), self.token.as_deref());
        if let Some(mut connection) = self.connection.take() {
            match connection.post(path, content, RESPONSE_BYTES_MAX, deadline) {
                Ok(response) => {
                    self.connection = Some(connection);
                    return Ok(response);
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error.into()),
                Err(_) => {}
            }
        }
        let mut connection = HttpConnection::open(&self.endpoint, self.tls.as_ref(), deadline)?;
        let response = connection.post(path, content, RESPONSE_BYTES_MAX, deadline)?;
        self.connection = Some(connection);
        Ok(response)
    }
}

fn is_unauthenticated(response: &Response) -> bool {
    response.status == 401
        || response.status != 200
            && String::from_utf8_lossy(&response.body).contains("invalid auth token")
}

/// Returns the body of a response that is no error.
fn accepted(response: Response) -> Result<Vec<u8>, EtcdError> {
    let status = response.status;
    if status == 200 {
        return Ok(response.body);
    }
    let explained: ErrorResponse = serde_json::from_slice(&response.body).unwrap_or_default();
    let text = match explained.message.is_empty() {
        true => explained.error,
        false => explained.message,
    };
    let is_plain = |letter: &char| !letter.is_control();
    let message = text.chars().filter(is_plain).take(ERROR_CHARS_MAX);
    Err(EtcdError::Refused {
        status,
        message: message.collect(),
    })
}

fn read_password(path: &Path) -> Result<String, EtcdError> {
    let password_error = |source| EtcdError::Password {
        path: path.to_owned(),
        source,
    };
    let text = std::fs::read_to_string(path).map_err(password_error)?;
    let password = text.trim_end_matches(['\r', '\n']);
    if password.is_empty() || password.len() > PASSWORD_BYTES_MAX {
        let error = io::Error::new(io::ErrorKind::InvalidData, "the file has no password");
        return Err(password_error(error));
    }
    Ok(password.to_owned())
}

fn tls_config(config: &EtcdConfig) -> Result<Arc<ClientConfig>, EtcdError> {
    let mut roots = RootCertStore::empty();
    let ca = config.ca.as_ref();
    for certificate in ca
        .map(|path| read_certificates(path))
        .transpose()?
        .into_iter()
        .flatten()
    {
        roots
            .add(certificate)
            .map_err(|error| EtcdError::Io(io::Error::other(error)))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key_error = |path: &PathBuf, problem: String| EtcdError::Key {
        path: path.clone(),
        problem,
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| EtcdError::Io(io::Error::other(error)))?
        .with_root_certificates(roots);
    let tls = match (&config.certificate, &config.key) {
        (Some(certificate), Some(path)) => {
            let chain = read_certificates(certificate)?;
            let key = PrivateKeyDer::from_pem_file(path);
            let key = key.map_err(|error| key_error(path, error.to_string()))?;
            let tls = builder.with_client_auth_cert(chain, key);
            tls.map_err(|error| key_error(path, error.to_string()))?
        }
        _ => builder.with_no_client_auth(),
    };
    Ok(Arc::new(tls))
}
