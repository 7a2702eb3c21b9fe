//! Requests about join tokens and revocation lists.

use super::{ClientError, ControlClient, percent_encode};
use crate::control::{
    NewToken, RevocationRequest, RevocationStatus, TokenEntry, TokenList, TokenRequest,
};

impl ControlClient {
    /// `POST /v1/tokens`: makes a join token.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn make_token(&self, request: &TokenRequest) -> Result<NewToken, ClientError> {
        self.post("/v1/tokens", request).await
    }

    /// `GET /v1/tokens`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn tokens(&self) -> Result<TokenList, ClientError> {
        self.get("/v1/tokens").await
    }

    /// `POST /v1/tokens/{id}/revoke`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn revoke_token(&self, id: &str) -> Result<TokenEntry, ClientError> {
        let id = percent_encode(id);
        self.post(&format!("/v1/tokens/{id}/revoke"), &()).await
    }

    /// `GET /v1/revocations`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn revocations(&self) -> Result<RevocationStatus, ClientError> {
        self.get("/v1/revocations").await
    }

    /// `POST /v1/revocations`: puts a revocation list in force.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn publish_revocations(
        &self,
        request: &RevocationRequest,
    ) -> Result<RevocationStatus, ClientError> {
        self.post("/v1/revocations", request).await
    }
}
